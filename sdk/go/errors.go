package kvhash

import "fmt"

// Code is the stable name of a fault, the same in every kvhash SDK. It is an error itself, so that a fault is
// recognized with errors.Is:
//
//	if errors.Is(err, kvhash.CodeUnknownRoot) { ... }
type Code string

// Error returns the code's name.
func (c Code) Error() string { return string(c) }

// The codes. They never change once released; messages may.
const (
	// CodeUnknownRelease: no vLLM release, or one older than the oldest that can be reproduced.
	CodeUnknownRelease Code = "unknown-release"
	// CodeUnknownAlgorithm: no algorithm of any release.
	CodeUnknownAlgorithm Code = "unknown-algorithm"
	// CodeAlgorithmNotInRelease: an algorithm of other releases.
	CodeAlgorithmNotInRelease Code = "algorithm-not-in-release"
	// CodeAlgorithmNotReproducible: an algorithm whose values differ by process ("builtin").
	CodeAlgorithmNotReproducible Code = "algorithm-not-reproducible"
	// CodeUnknownRoot: vLLM draws NONE_HASH at random for these settings.
	CodeUnknownRoot Code = "unknown-root"
	// CodeFeatureNotInRelease: the release does not have what the request uses.
	CodeFeatureNotInRelease Code = "feature-not-in-release"
	// CodeInvalidRequest: a field is missing, unknown, or of the wrong type or range.
	CodeInvalidRequest Code = "invalid-request"
	// CodeInvalidBlockSize: a block size or context-parallel size that cannot be used.
	CodeInvalidBlockSize Code = "invalid-block-size"
	// CodeInvalidToken: a token id is no integer from 0 to 2^64 - 1.
	CodeInvalidToken Code = "invalid-token"
	// CodeInvalidSeed: the hash seed is not text.
	CodeInvalidSeed Code = "invalid-seed"
	// CodeInvalidSalt: the cache salt is not text.
	CodeInvalidSalt Code = "invalid-salt"
	// CodeInvalidLora: the adapter lacks what the release hashes, or has it in the wrong type.
	CodeInvalidLora Code = "invalid-lora"
	// CodeInvalidMultimodal: an item overlaps another, is out of order, or reaches past the end.
	CodeInvalidMultimodal Code = "invalid-multimodal"
	// CodeInvalidPromptEmbeds: too few rows, an unknown dtype, or data of the wrong length.
	CodeInvalidPromptEmbeds Code = "invalid-prompt-embeds"
	// CodeInvalidHash: a value that has no such form, or is no block hash.
	CodeInvalidHash Code = "invalid-hash"
	// CodeInvalidJSON: a request line is no strict JSON.
	CodeInvalidJSON Code = "invalid-json"
	// CodeInvalidUTF8: a request line is not UTF-8.
	CodeInvalidUTF8 Code = "invalid-utf8"
	// CodeLineTooLong: a request line is longer than MaxLineBytes.
	CodeLineTooLong Code = "line-too-long"
	// CodeInvalidBatch: an event payload is no batch.
	CodeInvalidBatch Code = "invalid-batch"
	// CodeInvalidMsgpack: an event payload is truncated, malformed or has trailing bytes.
	CodeInvalidMsgpack Code = "invalid-msgpack"
	// CodeNestedTooDeeply: an event payload is nested beyond reason.
	CodeNestedTooDeeply Code = "nested-too-deeply"
	// CodePayloadTooLarge: an event payload is longer than MaxPayloadBytes.
	CodePayloadTooLarge Code = "payload-too-large"
)

// Error is every error that this package returns: what was wrong and what would be right, where, and the fault's
// stable code.
type Error struct {
	Code    Code
	Message string
	// At is the path of the offending value in the request ("$.multimodal[1].offset"), or empty.
	At string
}

// Error returns the message with the place.
func (e *Error) Error() string {
	if e.At == "" {
		return e.Message
	}
	return e.Message + " - at " + e.At
}

// Unwrap returns the code, for errors.Is.
func (e *Error) Unwrap() error { return e.Code }

func fault(code Code, at, format string, arguments ...any) *Error {
	return &Error{Code: code, At: at, Message: fmt.Sprintf(format, arguments...)}
}
