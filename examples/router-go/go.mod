module github.com/kvhash/kvhash/examples/router-go

go 1.22

require (
	github.com/go-zeromq/zmq4 v0.17.0
	github.com/kvhash/kvhash/sdk/go v0.0.0
)

require (
	github.com/go-zeromq/goczmq/v4 v4.2.2 // indirect
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	github.com/zeebo/xxh3 v1.1.0 // indirect
	golang.org/x/sync v0.7.0 // indirect
	golang.org/x/sys v0.30.0 // indirect
	golang.org/x/text v0.15.0 // indirect
)

replace github.com/kvhash/kvhash/sdk/go => ../../sdk/go
