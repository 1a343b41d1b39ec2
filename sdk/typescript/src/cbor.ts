/** Canonical CBOR (RFC 8949 section 4.2.1) of a preimage: every head as short as it can be. */

import { ByteWriter, Ref, utf8, type Int, type Value } from "./values.js";

const UINT = 0x00;
const NINT = 0x20;
const BYTES = 0x40;
const TEXT = 0x60;
const ARRAY = 0x80;
const TAG = 0xc0;
const NULL = 0xf6;

/** Serializes `value` as `cbor2.dumps(value, canonical=True)` does. */
export function encodeCbor(value: Value): Uint8Array {
  const out = new ByteWriter();
  write(out, value);
  return out.bytes();
}

function write(out: ByteWriter, given: Value): void {
  const value = given instanceof Ref ? given.value : given;
  if (value === null) {
    out.byte(NULL);
  } else if (typeof value === "number" || typeof value === "bigint") {
    writeInt(out, value);
  } else if (typeof value === "string") {
    const payload = utf8(value);
    writeHead(out, TEXT, payload.length);
    out.write(payload);
  } else if (value instanceof Uint8Array) {
    writeHead(out, BYTES, value.length);
    out.write(value);
  } else {
    const items = value as readonly Value[];
    writeHead(out, ARRAY, items.length);
    for (const item of items) write(out, item);
  }
}

function writeInt(out: ByteWriter, value: Int): void {
  if (typeof value === "number" && value >= 0) {
    writeHead(out, UINT, value);
    return;
  }
  const whole = BigInt(value);
  const negative = whole < 0n;
  const magnitude = negative ? -1n - whole : whole;
  if (magnitude < 1n << 64n) {
    writeHead(out, negative ? NINT : UINT, magnitude);
    return;
  }
  const payload = magnitudeBytes(magnitude);
  writeHead(out, TAG, negative ? 3 : 2);
  writeHead(out, BYTES, payload.length);
  out.write(payload);
}

function writeHead(out: ByteWriter, major: number, argument: Int): void {
  if (argument < 24) {
    out.byte(major | Number(argument));
  } else if (argument < 0x100) {
    out.byte(major | 24);
    out.byte(Number(argument));
  } else if (argument < 0x10000) {
    out.byte(major | 25);
    out.uint16(Number(argument), false);
  } else if (argument < 0x100000000) {
    out.byte(major | 26);
    out.uint32(Number(argument), false);
  } else {
    out.byte(major | 27);
    out.uint64(BigInt(argument), false);
  }
}

/** Returns a positive integer in the fewest bytes, most significant first. */
function magnitudeBytes(value: bigint): Uint8Array {
  const digits = value.toString(16);
  const hex = digits.length % 2 ? `0${digits}` : digits;
  const bytes = new Uint8Array(hex.length / 2);
  for (let i = 0; i < bytes.length; i++) bytes[i] = Number.parseInt(hex.slice(2 * i, 2 * i + 2), 16);
  return bytes;
}
