/**
 * What a block hash preimage is made of, with object identity said explicitly.
 *
 * Pickle writes an object that it has met before as a back-reference, so equal values give different bytes depending
 * on whether they are the same object. A plain string or byte array is a fresh object at every place where it stands;
 * a `Ref` is one object wherever that same instance stands. CBOR has no identity; there a `Ref` is its value.
 */

/** One text or bytes object that may stand in several places of one preimage. */
export class Ref {
  constructor(readonly value: string | Uint8Array) {}
}

/** An integer: a `number` must be a safe integer, anything larger is a `bigint`. */
export type Int = number | bigint;

/** A value that can be part of a preimage. */
export type Value = null | Int | string | Uint8Array | Ref | readonly Value[];

/** Token ids, each 0 to 2^64 - 1. */
export type TokenIds = readonly Int[] | Uint8Array | Uint16Array | Uint32Array | BigUint64Array;

/** Returns an integer as a `number` where that is exact, else as it is. */
export function compact(value: bigint): Int {
  return value >= BigInt(Number.MIN_SAFE_INTEGER) && value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : value;
}

const encoder = new TextEncoder();

/** Returns the UTF-8 bytes of a text without lone surrogates. */
export function utf8(text: string): Uint8Array {
  return encoder.encode(text);
}

/** Returns lower-case hex. */
export function toHex(bytes: Uint8Array): string {
  let text = "";
  for (const byte of bytes) text += HEX[byte]!;
  return text;
}

/** Reads hex in either case, white space between bytes passed over as Python does; null for what is none. */
export function fromHex(spaced: string): Uint8Array | null {
  const runs = spaced.split(/[ \t\n\r\v\f]+/);
  const text = runs.join("");
  if (runs.some((run) => run.length % 2) || /[^0-9a-fA-F]/.test(text)) return null;
  const bytes = new Uint8Array(text.length / 2);
  for (let i = 0; i < bytes.length; i++) bytes[i] = Number.parseInt(text.slice(2 * i, 2 * i + 2), 16);
  return bytes;
}

const HEX: readonly string[] = Array.from({ length: 256 }, (_, byte) => byte.toString(16).padStart(2, "0"));

/** Reads bytes as one unsigned integer, most significant byte first. */
export function bigEndian(bytes: Uint8Array): bigint {
  return bytes.length === 0 ? 0n : BigInt(`0x${toHex(bytes)}`);
}

/** Bytes being written; grows as needed. */
export class ByteWriter {
  #bytes: Uint8Array;
  #view: DataView;
  #length = 0;

  constructor(capacity = 256) {
    this.#bytes = new Uint8Array(capacity);
    this.#view = new DataView(this.#bytes.buffer);
  }

  get length(): number {
    return this.#length;
  }

  /** The bytes written so far; valid until the next write. */
  bytes(): Uint8Array {
    return this.#bytes.subarray(0, this.#length);
  }

  byte(value: number): void {
    this.#room(1);
    this.#bytes[this.#length++] = value;
  }

  write(data: Uint8Array): void {
    this.#room(data.length);
    this.#bytes.set(data, this.#length);
    this.#length += data.length;
  }

  uint16(value: number, littleEndian: boolean): void {
    this.#room(2);
    this.#view.setUint16(this.#length, value, littleEndian);
    this.#length += 2;
  }

  /** Writes the low 32 bits; a negative value as two's complement. */
  uint32(value: number, littleEndian: boolean): void {
    this.#room(4);
    this.#view.setUint32(this.#length, value, littleEndian);
    this.#length += 4;
  }

  uint64(value: bigint, littleEndian: boolean): void {
    this.#room(8);
    this.#view.setBigUint64(this.#length, value, littleEndian);
    this.#length += 8;
  }

  #room(more: number): void {
    if (this.#length + more <= this.#bytes.length) return;
    const grown = new Uint8Array(Math.max(this.#bytes.length * 2, this.#length + more));
    grown.set(this.#bytes.subarray(0, this.#length));
    this.#bytes = grown;
    this.#view = new DataView(grown.buffer);
  }
}
