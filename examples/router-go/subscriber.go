package router

import (
	"context"
	"encoding/binary"
	"errors"
	"time"

	"github.com/go-zeromq/zmq4"

	kvhash "github.com/kvhash/kvhash/sdk/go"
)

// endSeq is the sequence number of a replay's end marker, -1.
const endSeq = ^uint64(0)

// Source is where an engine's events are, and where it replays them (empty: nowhere).
type Source struct {
	Engine, Events, Replay string
	// ReplayTimeout bounds one replay; 0 is 5 s.
	ReplayTimeout time.Duration
	// Ready is called once, when what was published before has been asked for; nil: not.
	Ready func()
}

type message struct {
	seq   uint64
	batch *kvhash.EventBatch
}

// Follow reads a source's events into the index until the context ends. What was published before is asked for by
// replay; so is what a gap leaves out. What cannot be had makes the engine's knowledge Degraded. A restart, told by a
// lower number with a later time, empties it.
func Follow(ctx context.Context, source Source, index *Index) error {
	socket := zmq4.NewSub(ctx, zmq4.WithAutomaticReconnect(true), zmq4.WithDialerMaxRetries(-1))
	defer socket.Close()
	if err := socket.Dial(source.Events); err != nil {
		return err
	}
	if err := socket.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		return err
	}
	follower := follower{ctx: ctx, source: source, index: index}
	follower.fill(endSeq) // what was published before
	if source.Ready != nil {
		source.Ready()
	}
	for {
		received, err := socket.Recv()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		if one, err := parse(received.Frames); err == nil {
			follower.take(one)
		} else if !errors.Is(err, errNoBatch) {
			index.Lost(source.Engine) // a numbered message that cannot be read
			follower.next = one.seq + 1
		}
	}
}

type follower struct {
	ctx    context.Context
	source Source
	index  *Index
	next   uint64
	lastAt float64
}

func (f *follower) take(one message) {
	switch {
	case one.seq < f.next && one.batch.Timestamp <= f.lastAt:
		return // it came by replay already
	case one.seq < f.next:
		f.index.Remove(f.source.Engine)
		f.next, f.lastAt = 0, 0
	}
	if one.seq > f.next {
		f.fill(one.seq)
	}
	if one.seq > f.next {
		f.index.Lost(f.source.Engine)
	}
	if one.seq >= f.next {
		f.apply(one)
	}
}

func (f *follower) apply(one message) {
	f.index.Apply(f.source.Engine, one.batch)
	f.next, f.lastAt = one.seq+1, one.batch.Timestamp
}

// fill applies what a replay has from the next number up to, and without, `before`.
func (f *follower) fill(before uint64) {
	if f.source.Replay == "" {
		return
	}
	replayed, err := replay(f.ctx, f.source, f.next)
	for _, one := range replayed {
		if one.seq < f.next || one.seq >= before {
			continue
		}
		if one.seq > f.next {
			f.index.Lost(f.source.Engine)
		}
		f.apply(one)
	}
	if err != nil {
		f.index.Lost(f.source.Engine)
	}
}

// replay asks for the batches from `start` on.
func replay(ctx context.Context, source Source, start uint64) ([]message, error) {
	timeout := source.ReplayTimeout
	if timeout == 0 {
		timeout = 5 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	socket := zmq4.NewDealer(ctx, zmq4.WithDialerTimeout(timeout))
	defer socket.Close()
	if err := socket.Dial(source.Replay); err != nil {
		return nil, err
	}
	if err := socket.SendMulti(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, start))); err != nil {
		return nil, err
	}
	var messages []message
	for {
		received, err := socket.Recv()
		if err != nil {
			return messages, err
		}
		frames := received.Frames
		if len(frames) == 3 { // releases before 0.26: ["", seq, payload]
			frames = append([][]byte{nil, nil}, frames[1:]...)
		}
		if len(frames) != 4 || len(frames[2]) != 8 {
			continue
		}
		if binary.BigEndian.Uint64(frames[2]) == endSeq {
			return messages, nil
		}
		one, err := parse(frames[1:])
		if err != nil {
			return messages, err
		}
		messages = append(messages, one)
	}
}

var errNoBatch = errors.New("not a message of three frames with a sequence number")

// parse reads [topic, sequence number, payload].
func parse(frames [][]byte) (message, error) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return message{}, errNoBatch
	}
	one := message{seq: binary.BigEndian.Uint64(frames[1])}
	batch, err := kvhash.DecodeBatch(frames[2])
	one.batch = batch
	return one, err
}
