package main

import (
	"strings"
	"testing"
	"time"

	kvhash "github.com/kvhash/kvhash/sdk/go"

	router "github.com/kvhash/kvhash/examples/router-go"
)

func TestEnginesThatCannotBeFollowedAreRefused(t *testing.T) {
	for _, wrong := range []string{
		"a", "=tcp://h:5", "a=", "a=h:5", "a=tcp://*:5", "a=tcp://h", "a=tcp://h:0", "a=tcp://h:99999", "a=ipc://",
		"a=tcp://h:5,", "a=tcp://h:5,tcp://*:6", "a=tcp://h:5,tcp://h:6,tcp://h:7",
		"a=ipc://" + strings.Repeat("x", 500), "a=tcp://h:5,ipc://" + strings.Repeat("x", 500),
	} {
		if new(sources).Set(wrong) == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
	var engines sources
	for _, right := range []string{"a=tcp://h:5", "b=tcp://[::1]:5,tcp://h:6", "c=ipc:///tmp/x"} {
		if err := engines.Set(right); err != nil {
			t.Error(err)
		}
	}
	if engines.Set("a=tcp://h:9") == nil {
		t.Error("a name is accepted twice")
	}
}

func TestQuestionsThatSayNothingAreRefused(t *testing.T) {
	hasher, err := kvhash.NewHasher(kvhash.Options{HashSeed: kvhash.Seed("0")})
	if err != nil {
		t.Fatal(err)
	}
	engines, index := sources{{Engine: "a"}}, router.NewIndex()
	for _, wrong := range []string{
		`{}`, `{"tokens":[]}`, `[]`, `{"tokens":[1],"speed":{"a":-1}}`, `{"tokens":[1],"speed":{"a":0}}`,
		`{"tokens":[1],"queued":{"a":-1}}`, `{"tokens":[1],"recent":{"a":-1}}`, `{"tokens":[1]} {"tokens":[2]}`, `{"tokens":[1]}]`,
		`{"tokens":[1],"lora":{"name":"a","rank":3}}`,
	} {
		if route([]byte(wrong), hasher, engines, index).Error == "" {
			t.Errorf("%s is accepted", wrong)
		}
	}
	if said := route([]byte(`{"tokens":[1],"speed":{"a":2}}`), hasher, engines, index); said.Engine != "a" {
		t.Errorf("answered %+v", said)
	}
}

func TestTheFirstAnswerWaitsForReplaysButNotForEver(t *testing.T) {
	ready := make(chan string, 3)
	ready <- "a"
	ready <- "a" // said twice, it is still one
	began := time.Now()
	waitFor(ready, 2, 50*time.Millisecond)
	if time.Since(began) < 50*time.Millisecond {
		t.Error("did not wait for the second engine")
	}
	ready <- "a"
	ready <- "b"
	waitFor(ready, 2, time.Hour)
}
