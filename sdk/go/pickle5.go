package kvhash

import (
	"encoding/binary"
	"fmt"
	"math/big"
	"slices"
)

// Pickle protocol 5, byte for byte as CPython's C pickler writes a preimage:
//
//	80 05                       PROTO 5
//	95 <8 bytes, little-endian> FRAME, with the length of what follows in this frame
//	...                         the value
//	2e                          STOP
//
// Text, bytes and non-empty tuples are numbered in the order in which they are finished; an object met again is
// written as its number. Integers and nil are never numbered; the empty text and the empty bytes are one object
// each. Before each value a frame of 64 KiB or more is closed; a frame of fewer than 4 bytes has no header. Text
// or bytes of 64 KiB or more stand outside the frames.

const (
	pickleMemoize    = 0x94
	frameSizeTarget  = 64 * 1024
	frameSizeMinimum = 4
)

func appendPickleUint(out []byte, number uint64) []byte {
	switch {
	case number < 1<<8:
		return append(out, 'K', byte(number))
	case number < 1<<16:
		return binary.LittleEndian.AppendUint16(append(out, 'M'), uint16(number))
	case number < 1<<31:
		return binary.LittleEndian.AppendUint32(append(out, 'J'), uint32(number))
	}
	// Two's complement in the fewest bytes that keep the sign.
	var payload [9]byte
	binary.LittleEndian.PutUint64(payload[:], number)
	length := 4
	for ; length < 9 && (number>>(8*length-1)) != 0; length++ {
	}
	return append(append(out, 0x8a, byte(length)), payload[:length]...)
}

func appendPickleBig(out []byte, number *big.Int) []byte {
	if number.IsUint64() {
		return appendPickleUint(out, number.Uint64())
	}
	if number.IsInt64() && number.Int64() >= -1<<31 {
		return binary.LittleEndian.AppendUint32(append(out, 'J'), uint32(number.Int64()))
	}
	magnitude := number
	if number.Sign() < 0 {
		magnitude = new(big.Int).Not(number)
	}
	payload := make([]byte, magnitude.BitLen()/8+1)
	magnitude.FillBytes(payload)
	if number.Sign() < 0 {
		for i := range payload {
			payload[i] = ^payload[i]
		}
	}
	slices.Reverse(payload)
	if len(payload) < 1<<8 {
		out = append(out, 0x8a, byte(len(payload)))
	} else {
		out = binary.LittleEndian.AppendUint32(append(out, 0x8b), uint32(len(payload)))
	}
	return append(out, payload...)
}

type pickler struct {
	out      []byte // finished frames
	frame    []byte // the open frame
	open     bool
	memo     map[any]int // by *ref, or by the empty text or octets
	numbered int
}

// appendPickle5 appends a preimage as pickle.dumps(value, protocol=5) writes it.
func appendPickle5(out []byte, v value) []byte {
	p := pickler{out: append(out, 0x80, 5)}
	p.save(v)
	p.write('.')
	p.closeFrame()
	return p.out
}

func (p *pickler) write(data ...byte) {
	p.open = true
	p.frame = append(p.frame, data...)
}

func (p *pickler) closeFrame() {
	if !p.open {
		return
	}
	if len(p.frame) >= frameSizeMinimum {
		p.out = binary.LittleEndian.AppendUint64(append(p.out, 0x95), uint64(len(p.frame)))
	}
	p.out = append(p.out, p.frame...)
	p.frame, p.open = p.frame[:0], false
}

func (p *pickler) save(v value) {
	if len(p.frame) >= frameSizeTarget {
		p.closeFrame()
	}
	switch v := v.(type) {
	case nil:
		p.write('N')
	case uinteger:
		p.open = true
		p.frame = appendPickleUint(p.frame, uint64(v))
	case bigInteger:
		p.open = true
		p.frame = appendPickleBig(p.frame, v.Int)
	case tuple:
		p.saveTuple(v)
	case text:
		p.saveObject(string(v), v, 0x8c, 'X', 0x8d)
	case octets:
		p.saveObject(string(v), v, 'C', 'B', 0x8e)
	case *ref:
		p.saveObject(string(v.text), v, 0x8c, 'X', 0x8d)
	default:
		panic(fmt.Sprintf("kvhash: a preimage holds no %T", v))
	}
}

func (p *pickler) saveTuple(items tuple) {
	if len(items) == 0 {
		p.write(')')
		return
	}
	if len(items) > 3 {
		p.write('(')
	}
	for _, item := range items {
		p.save(item)
	}
	if len(items) > 3 {
		p.write('t')
	} else {
		p.write(0x84 + byte(len(items)))
	}
	p.memoize(nil)
}

// saveObject writes text or bytes; short, medium and large are the opcodes for 1, 4 and 8 bytes of length.
func (p *pickler) saveObject(content string, object value, short, medium, large byte) {
	var identity any
	if _, isRef := object.(*ref); isRef {
		identity = object
	}
	if content == "" {
		identity = short // one empty text and one empty bytes
	}
	if identity != nil {
		if number, met := p.memo[identity]; met {
			if number < 1<<8 {
				p.write('h', byte(number))
			} else {
				p.write(binary.LittleEndian.AppendUint32([]byte{'j'}, uint32(number))...)
			}
			return
		}
	}
	var head []byte
	switch length := uint64(len(content)); {
	case length < 1<<8:
		head = []byte{short, byte(length)}
	case length < 1<<32:
		head = binary.LittleEndian.AppendUint32([]byte{medium}, uint32(length))
	default:
		head = binary.LittleEndian.AppendUint64([]byte{large}, length)
	}
	if len(content) < frameSizeTarget {
		p.write(head...)
		p.frame = append(p.frame, content...)
	} else {
		p.closeFrame()
		p.out = append(append(p.out, head...), content...)
	}
	p.memoize(identity)
}

func (p *pickler) memoize(identity any) {
	if identity != nil {
		if p.memo == nil {
			p.memo = map[any]int{}
		}
		p.memo[identity] = p.numbered
	}
	p.numbered++
	p.write(pickleMemoize)
}
