package kvhash

import (
	"encoding/binary"
	"fmt"
	"math/big"
)

// Canonical CBOR (RFC 8949 section 4.2.1): every head is as short as it can be.

const (
	cborUint  = 0x00
	cborNint  = 0x20
	cborBytes = 0x40
	cborText  = 0x60
	cborArray = 0x80
	cborTag   = 0xc0
	cborNull  = 0xf6
)

func appendCBORHead(out []byte, major byte, argument uint64) []byte {
	switch {
	case argument < 24:
		return append(out, major|byte(argument))
	case argument < 1<<8:
		return append(out, major|24, byte(argument))
	case argument < 1<<16:
		return binary.BigEndian.AppendUint16(append(out, major|25), uint16(argument))
	case argument < 1<<32:
		return binary.BigEndian.AppendUint32(append(out, major|26), uint32(argument))
	default:
		return binary.BigEndian.AppendUint64(append(out, major|27), argument)
	}
}

func appendCBORBig(out []byte, number *big.Int) []byte {
	major, tag, magnitude := byte(cborUint), uint64(2), number
	if number.Sign() < 0 {
		major, tag, magnitude = cborNint, 3, new(big.Int).Not(number) // -1 - n
	}
	if magnitude.IsUint64() {
		return appendCBORHead(out, major, magnitude.Uint64())
	}
	payload := magnitude.Bytes()
	out = appendCBORHead(appendCBORHead(out, cborTag, tag), cborBytes, uint64(len(payload)))
	return append(out, payload...)
}

// appendCBOR appends a preimage as canonical CBOR.
func appendCBOR(out []byte, v value) []byte {
	switch v := v.(type) {
	case nil:
		return append(out, cborNull)
	case uinteger:
		return appendCBORHead(out, cborUint, uint64(v))
	case bigInteger:
		return appendCBORBig(out, v.Int)
	case text:
		return append(appendCBORHead(out, cborText, uint64(len(v))), v...)
	case octets:
		return append(appendCBORHead(out, cborBytes, uint64(len(v))), v...)
	case *ref:
		return appendCBOR(out, v.text)
	case tuple:
		out = appendCBORHead(out, cborArray, uint64(len(v)))
		for _, item := range v {
			out = appendCBOR(out, item)
		}
		return out
	default:
		panic(fmt.Sprintf("kvhash: a preimage holds no %T", v))
	}
}
