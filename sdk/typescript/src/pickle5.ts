/**
 * Pickle protocol 5, byte for byte as CPython's C pickler writes a preimage.
 *
 * Three rules make the bytes what they are. **Memo**: text, bytes and non-empty tuples are numbered in the order in
 * which they are finished; an object (not an equal value) met again is a back-reference. Integers and null are never
 * numbered; the empty text and the empty bytes are one object each. **Frames**: before each value an open frame of
 * 64 KiB or more is closed; a frame of fewer than 4 bytes has no header. **Large payloads**: text or bytes of 64 KiB
 * or more stand outside any frame.
 */

import { ByteWriter, Ref, utf8, type Int, type Value } from "./values.js";

const FRAME_SIZE_TARGET = 64 * 1024;
const FRAME_SIZE_MIN = 4;
const STOP = 0x2e;
const NONE = 0x4e;
const MARK = 0x28;
const MEMOIZE = 0x94;
const FRAME = 0x95;
const EMPTY_TUPLE = 0x29;
const TUPLE = 0x74;
const SHORT_TUPLES: readonly number[] = [EMPTY_TUPLE, 0x85, 0x86, 0x87];

/** Serializes `value` as `pickle.dumps(value, protocol=5)` does, with identities as `Ref` says. */
export function encodePickle5(value: Value): Uint8Array {
  const writer = new PickleWriter();
  writer.save(value);
  return writer.finish();
}

class PickleWriter {
  readonly #out = new ByteWriter();
  #frame: ByteWriter | null = null;
  // The number of each object met. An empty value stands for itself: "" for text, EMPTY_BYTES for bytes.
  readonly #memo = new Map<unknown, number>();
  #numbered = 0;

  constructor() {
    this.#out.byte(0x80);
    this.#out.byte(5);
  }

  finish(): Uint8Array {
    this.#open().byte(STOP);
    this.#closeFrame();
    return this.#out.bytes();
  }

  save(value: Value): void {
    if (this.#frame !== null && this.#frame.length >= FRAME_SIZE_TARGET) this.#closeFrame();
    if (value === null) {
      this.#open().byte(NONE);
    } else if (typeof value === "number" || typeof value === "bigint") {
      writePickleInt(this.#open(), value);
    } else if (value instanceof Ref || typeof value === "string" || value instanceof Uint8Array) {
      this.#saveObject(value);
    } else {
      this.#saveTuple(value as readonly Value[]);
    }
  }

  #saveTuple(items: readonly Value[]): void {
    if (items.length === 0) {
      this.#open().byte(EMPTY_TUPLE);
      return;
    }
    const closing = SHORT_TUPLES[items.length];
    if (closing === undefined) this.#open().byte(MARK);
    for (const item of items) this.save(item);
    this.#open().byte(closing ?? TUPLE);
    this.#memoize(null);
  }

  #saveObject(value: string | Uint8Array | Ref): void {
    const content = value instanceof Ref ? value.value : value;
    let identity: unknown = value instanceof Ref ? value : null;
    if (content.length === 0) identity = typeof content === "string" ? "" : EMPTY_BYTES;
    const number = identity === null ? undefined : this.#memo.get(identity);
    if (number !== undefined) {
      const frame = this.#open();
      if (number < 0x100) {
        frame.byte(0x68);
        frame.byte(number);
      } else {
        frame.byte(0x6a);
        frame.uint32(number, true);
      }
      return;
    }
    const isText = typeof content === "string";
    const payload = isText ? utf8(content) : content;
    if (payload.length >= FRAME_SIZE_TARGET) this.#closeFrame();
    const target = payload.length >= FRAME_SIZE_TARGET ? this.#out : this.#open();
    if (payload.length < 0x100) {
      target.byte(isText ? 0x8c : 0x43);
      target.byte(payload.length);
    } else {
      target.byte(isText ? 0x58 : 0x42);
      target.uint32(payload.length, true);
    }
    target.write(payload);
    this.#memoize(identity);
  }

  #memoize(identity: unknown): void {
    if (identity !== null) this.#memo.set(identity, this.#numbered);
    this.#numbered += 1;
    this.#open().byte(MEMOIZE);
  }

  #open(): ByteWriter {
    return (this.#frame ??= new ByteWriter());
  }

  #closeFrame(): void {
    const frame = this.#frame;
    if (frame === null) return;
    if (frame.length >= FRAME_SIZE_MIN) {
      this.#out.byte(FRAME);
      this.#out.uint64(BigInt(frame.length), true);
    }
    this.#out.write(frame.bytes());
    this.#frame = null;
  }
}

const EMPTY_BYTES = Symbol("empty bytes");

/** Writes one integer as its shortest opcode: BININT1, BININT2, BININT, LONG1 or LONG4. */
function writePickleInt(out: ByteWriter, value: Int): void {
  if (value >= 0 && value < 0x100) {
    out.byte(0x4b);
    out.byte(Number(value));
  } else if (value >= 0 && value < 0x10000) {
    out.byte(0x4d);
    out.uint16(Number(value), true);
  } else if (value >= -0x80000000 && value < 0x80000000) {
    out.byte(0x4a);
    out.uint32(Number(value), true);
  } else {
    const payload = twosComplement(BigInt(value));
    if (payload.length < 0x100) {
      out.byte(0x8a);
      out.byte(payload.length);
    } else {
      out.byte(0x8b);
      out.uint32(payload.length, true);
    }
    out.write(payload);
  }
}

/** Returns little-endian two's complement in the fewest bytes that keep the sign. */
function twosComplement(value: bigint): Uint8Array {
  const magnitude = value >= 0n ? value : ~value;
  const bits = magnitude === 0n ? 0 : magnitude.toString(2).length;
  const length = Math.floor(bits / 8) + 1;
  const bytes = new Uint8Array(length);
  let rest = BigInt.asUintN(8 * length, value);
  for (let i = 0; i < length; i++) {
    bytes[i] = Number(rest & 0xffn);
    rest >>= 8n;
  }
  return bytes;
}
