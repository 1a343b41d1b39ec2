// Kvhash-lines answers request lines and event lines on standard input, one JSON object a line on standard output.
// Its exit status is 0 even when lines were refused (the answers say so), 1 when reading or writing failed.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"

	kvhash "github.com/kvhash/kvhash/sdk/go"
)

// flusher hands every answer over at once, for a caller that waits for it before it asks on.
type flusher struct{ out *bufio.Writer }

func (f flusher) Write(data []byte) (int, error) {
	n, err := f.out.Write(data)
	if err == nil {
		err = f.out.Flush()
	}
	return n, err
}

func main() {
	var out io.Writer = flusher{bufio.NewWriterSize(os.Stdout, 1<<16)}
	if _, err := kvhash.AnswerLines(os.Stdin, out); err != nil {
		fmt.Fprintln(os.Stderr, "kvhash-lines:", err)
		os.Exit(1)
	}
}
