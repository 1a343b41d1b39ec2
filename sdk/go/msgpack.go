package kvhash

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"unicode/utf8"
)

// The msgpack reader. Time and memory are bounded by the payload's length, whatever lengths it declares, and an
// element can be passed over without being understood, so that one bad event does not lose its batch.

const maxMsgpackDepth = 128

var (
	errTruncated = errors.New("truncated")
	errNoValue   = errors.New("a byte that starts no value")
	errTrailing  = errors.New("more bytes after the value")
	errTooDeep   = errors.New("nested too deeply")
	errText      = errors.New("text that is not UTF-8")
	errKey       = errors.New("a map or an extension value as the key of a map")
	errTimestamp = errors.New("a timestamp that is none")
)

func (m WireMap) get(name string) (any, bool) {
	// Of a key that stands twice the last counts.
	for i := len(m) - 1; i >= 0; i-- {
		if key, isText := m[i].Key.(string); isText && key == name {
			return m[i].Value, true
		}
	}
	return nil, false
}

func packKind(v any) string {
	switch v.(type) {
	case nil:
		return "nil"
	case bool:
		return "a boolean"
	case float64:
		return "a float"
	case Integer:
		return "an integer"
	case string:
		return "text"
	case []byte:
		return "bytes"
	case []any:
		return "an array"
	case WireMap:
		return "a map"
	default:
		return "an extension value"
	}
}

func isPackArray(raw []byte) bool { return raw[0]&0xf0 == 0x90 || raw[0] == 0xdc || raw[0] == 0xdd }

func isPackMap(raw []byte) bool { return raw[0]&0xf0 == 0x80 || raw[0] == 0xde || raw[0] == 0xdf }

// packHead is what the first bytes of a value say: the kind, the size of its payload, or how many items follow.
type packHead struct {
	kind    byte // one of the kinds below
	payload int
	items   uint64
}

const (
	packOther = iota
	packFixint
	packUint
	packInt
	packFloat
	packText
	packBytes
	packExtension
	packArrayKind
	packMapKind
)

// head reads the head at the position and moves behind it; the payload is there in full.
func (r *packReader) head() (packHead, error) {
	if r.position >= len(r.data) {
		return packHead{}, errTruncated
	}
	c := r.data[r.position]
	r.position++
	var head packHead
	width := 0
	switch {
	case c <= 0x7f || c >= 0xe0:
		head.kind = packFixint
	case c <= 0x8f:
		head = packHead{kind: packMapKind, items: uint64(c & 0x0f)}
	case c <= 0x9f:
		head = packHead{kind: packArrayKind, items: uint64(c & 0x0f)}
	case c <= 0xbf:
		head = packHead{kind: packText, payload: int(c & 0x1f)}
	case c == 0xc0 || c == 0xc2 || c == 0xc3:
		head.kind = packOther
	case c >= 0xc4 && c <= 0xc6:
		head.kind, width = packBytes, 1<<(c-0xc4)
	case c >= 0xc7 && c <= 0xc9:
		head.kind, width = packExtension, 1<<(c-0xc7)
	case c == 0xca || c == 0xcb:
		head = packHead{kind: packFloat, payload: 4 << (c - 0xca)}
	case c >= 0xcc && c <= 0xcf:
		head = packHead{kind: packUint, payload: 1 << (c - 0xcc)}
	case c >= 0xd0 && c <= 0xd3:
		head = packHead{kind: packInt, payload: 1 << (c - 0xd0)}
	case c >= 0xd4 && c <= 0xd8:
		head = packHead{kind: packExtension, payload: 1 + 1<<(c-0xd4)}
	case c >= 0xd9 && c <= 0xdb:
		head.kind, width = packText, 1<<(c-0xd9)
	case c == 0xdc || c == 0xdd:
		head.kind, width = packArrayKind, 2<<(c-0xdc)
	case c == 0xde || c == 0xdf:
		head.kind, width = packMapKind, 2<<(c-0xde)
	default:
		return packHead{}, errNoValue
	}
	if width > 0 {
		length, err := r.uint(width)
		if err != nil {
			return packHead{}, err
		}
		if head.kind == packArrayKind || head.kind == packMapKind {
			head.items = length
		} else {
			head.payload = int(length)
		}
		if head.kind == packExtension {
			head.payload++
		}
	}
	if head.payload > len(r.data)-r.position {
		return packHead{}, errTruncated
	}
	return head, nil
}

type packReader struct {
	data     []byte
	position int
	depth    int
}

func (r *packReader) uint(width int) (uint64, error) {
	if width > len(r.data)-r.position {
		return 0, errTruncated
	}
	var number [8]byte
	copy(number[8-width:], r.data[r.position:r.position+width])
	r.position += width
	return binary.BigEndian.Uint64(number[:]), nil
}

// skip passes over one value without recursion, however deeply it is nested.
func (r *packReader) skip() error {
	for left := uint64(1); left > 0; left-- {
		head, err := r.head()
		if err != nil {
			return err
		}
		r.position += head.payload
		if head.kind == packMapKind {
			head.items *= 2
		}
		left += head.items
	}
	return nil
}

// split returns the elements of the array that data is, each as its own bytes.
func splitPackArray(data []byte) ([][]byte, error) {
	reader := packReader{data: data}
	head, err := reader.head()
	if err != nil {
		return nil, err
	}
	var elements [][]byte
	for ; head.items > 0; head.items-- {
		start := reader.position
		if err := reader.skip(); err != nil {
			return nil, err
		}
		elements = append(elements, data[start:reader.position])
	}
	if reader.position != len(data) {
		return nil, errTrailing
	}
	return elements, nil
}

// decodePack reads the one value that data is.
func decodePack(data []byte) (any, error) {
	reader := packReader{data: data}
	v, err := reader.value()
	if err == nil && reader.position != len(data) {
		err = errTrailing
	}
	return v, err
}

func (r *packReader) value() (any, error) {
	first := r.position
	head, err := r.head()
	if err != nil {
		return nil, err
	}
	switch head.kind {
	case packArrayKind, packMapKind:
		if r.depth++; r.depth > maxMsgpackDepth {
			return nil, errTooDeep
		}
		defer func() { r.depth-- }()
		if head.kind == packMapKind {
			return r.pairs(head.items)
		}
		items := make([]any, 0, min(head.items, uint64(len(r.data)-r.position)))
		for ; head.items > 0; head.items-- {
			item, err := r.value()
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		return items, nil
	case packFixint:
		return SignedInteger(int64(int8(r.data[first]))), nil
	case packOther:
		if r.data[first] == 0xc0 {
			return nil, nil
		}
		return r.data[first] == 0xc3, nil
	}
	payload := r.data[r.position : r.position+head.payload]
	r.position += head.payload
	switch head.kind {
	case packText:
		if !utf8.Valid(payload) {
			return nil, errText
		}
		return string(payload), nil
	case packBytes:
		return append([]byte{}, payload...), nil
	case packExtension:
		return newExtension(int8(payload[0]), payload[1:])
	}
	var wide [8]byte
	copy(wide[8-len(payload):], payload)
	bits := binary.BigEndian.Uint64(wide[:])
	switch {
	case head.kind == packUint:
		return UnsignedInteger(bits), nil
	case head.kind == packInt:
		shift := 64 - 8*len(payload)
		return SignedInteger(int64(bits<<shift) >> shift), nil
	case len(payload) == 4:
		return float64(math.Float32frombits(uint32(bits))), nil
	default:
		return math.Float64frombits(bits), nil
	}
}

func (r *packReader) pairs(count uint64) (any, error) {
	pairs := WireMap{}
	for ; count > 0; count-- {
		key, err := r.value()
		if err != nil {
			return nil, err
		}
		v, err := r.value()
		if err != nil {
			return nil, err
		}
		if !canBeKey(key) {
			return nil, errKey
		}
		pairs = append(pairs, WirePair{key, v})
	}
	return pairs, nil
}

// canBeKey tells what may stand before a map's value, in an array too: neither a map nor an extension value but a
// timestamp.
func canBeKey(v any) bool {
	switch v := v.(type) {
	case WireMap:
		return false
	case Extension:
		return v.Code == timestampCode
	case []any:
		return !slices.ContainsFunc(v, func(item any) bool { return !canBeKey(item) })
	}
	return true
}

const (
	timestampCode = -1
	firstSecond   = -62135596800 // year 1
	lastSecond    = 253402300799 // year 9999
)

// newExtension returns an extension value; a timestamp to the microsecond and in its shortest form.
func newExtension(code int8, data []byte) (any, error) {
	if code != timestampCode {
		return Extension{code, append([]byte{}, data...)}, nil
	}
	var seconds int64
	var nanoseconds uint64
	switch len(data) {
	case 4:
		seconds = int64(binary.BigEndian.Uint32(data))
	case 8:
		bits := binary.BigEndian.Uint64(data)
		seconds, nanoseconds = int64(bits&(1<<34-1)), bits>>34
	case 12:
		nanoseconds, seconds = uint64(binary.BigEndian.Uint32(data)), int64(binary.BigEndian.Uint64(data[4:]))
	default:
		return nil, errTimestamp
	}
	if nanoseconds > 999_999_999 || seconds < firstSecond || seconds > lastSecond {
		return nil, errTimestamp
	}
	nanoseconds = (nanoseconds + 500) / 1000 * 1000
	if nanoseconds == 1_000_000_000 {
		seconds, nanoseconds = seconds+1, 0
	}
	if seconds > lastSecond {
		return nil, errTimestamp
	}
	var out []byte
	switch bits := nanoseconds<<34 | uint64(seconds); {
	case seconds < 0 || seconds >= 1<<34:
		out = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, uint32(nanoseconds)), uint64(seconds))
	case bits >= 1<<32:
		out = binary.BigEndian.AppendUint64(nil, bits)
	default:
		out = binary.BigEndian.AppendUint32(nil, uint32(bits))
	}
	return Extension{timestampCode, out}, nil
}
