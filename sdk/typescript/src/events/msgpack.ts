/**
 * Reads msgpack, keeping what a JavaScript number would lose: 64-bit integers, and whether a number is a float.
 *
 * A published event is told right from wrong by the wire's types, so these must survive: that is why no general
 * library reads it. Time and memory are bounded by the payload's length, whatever lengths it declares.
 */

import { compact, type Int } from "../values.js";

/** A number that the wire calls a float. */
export class MsgpackFloat {
  constructor(readonly value: number) {}
}

/** An extension value; a timestamp (-1) is rounded to the microsecond and in its shortest form. */
export class MsgpackExt {
  constructor(
    readonly type: number,
    readonly data: Uint8Array,
  ) {}
}

export type MsgpackValue =
  | null
  | boolean
  | Int
  | MsgpackFloat
  | string
  | Uint8Array
  | MsgpackExt
  | readonly MsgpackValue[]
  | ReadonlyMap<MsgpackValue, MsgpackValue>;

/** The bytes are not one msgpack value, or (`nested`) one that is nested too deeply. */
export class MsgpackError extends Error {
  constructor(
    message: string,
    readonly nested = false,
  ) {
    super(message);
  }
}

/** Arrays and maps that may lie within each other. */
const MAX_DEPTH = 128;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** What stands at a place: a scalar of `size` bytes, or a container of `count` values (a map's keys count too). */
interface Head {
  readonly kind: "value" | "array" | "map";
  readonly start: number;
  readonly size: number;
  readonly count: number;
}

function headAt(data: Uint8Array, at: number): Head {
  const first = data[at];
  if (first === undefined) throw new MsgpackError("truncated");
  const container = (kind: "array" | "map", count: number, start: number): Head => ({ kind, start, size: 0, count });
  const value = (start: number, size: number): Head => {
    if (start + size > data.length) throw new MsgpackError("truncated");
    return { kind: "value", start, size, count: 0 };
  };
  if (first <= 0x7f || first >= 0xe0) return value(at, 1);
  if (first <= 0x8f) return container("map", (first & 0x0f) * 2, at + 1);
  if (first <= 0x9f) return container("array", first & 0x0f, at + 1);
  if (first <= 0xbf) return value(at + 1, first & 0x1f);
  switch (first) {
    case 0xc0:
    case 0xc2:
    case 0xc3:
      return value(at + 1, 0);
    case 0xc4:
    case 0xc5:
    case 0xc6:
      return value(at + 1 + (1 << (first - 0xc4)), unsigned(data, at + 1, 1 << (first - 0xc4)));
    case 0xc7:
    case 0xc8:
    case 0xc9:
      return value(at + 1 + (1 << (first - 0xc7)), 1 + unsigned(data, at + 1, 1 << (first - 0xc7)));
    case 0xca:
      return value(at + 1, 4);
    case 0xcb:
      return value(at + 1, 8);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
      return value(at + 1, 1 << (first - 0xcc));
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
      return value(at + 1, 1 << (first - 0xd0));
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
      return value(at + 1, 1 + (1 << (first - 0xd4)));
    case 0xd9:
    case 0xda:
    case 0xdb:
      return value(at + 1 + (1 << (first - 0xd9)), unsigned(data, at + 1, 1 << (first - 0xd9)));
    case 0xdc:
    case 0xdd:
      return container("array", unsigned(data, at + 1, 2 << (first - 0xdc)), at + 1 + (2 << (first - 0xdc)));
    case 0xde:
    case 0xdf:
      return container("map", 2 * unsigned(data, at + 1, 2 << (first - 0xde)), at + 1 + (2 << (first - 0xde)));
    default:
      throw new MsgpackError(`the byte 0x${first.toString(16)} starts no value`);
  }
}

function unsigned(data: Uint8Array, at: number, width: number): number {
  if (at + width > data.length) throw new MsgpackError("truncated");
  let number = 0;
  for (let i = 0; i < width; i++) number = number * 256 + data[at + i]!;
  return number;
}

/** Returns the position after the value at `at`, however deeply that is nested. */
function skip(data: Uint8Array, at: number): number {
  let position = at;
  for (let left = 1; left > 0; left--) {
    const head = headAt(data, position);
    position = head.start + head.size;
    left += head.count;
  }
  return position;
}

/** Whether the value that these bytes start with is an array. */
export function isArray(data: Uint8Array): boolean {
  const first = data[0]!;
  return (first & 0xf0) === 0x90 || first === 0xdc || first === 0xdd;
}

/** Whether the value that these bytes start with is a map. */
export function isMap(data: Uint8Array): boolean {
  const first = data[0]!;
  return (first & 0xf0) === 0x80 || first === 0xde || first === 0xdf;
}

/** Returns the elements of the one array (or keys and values of the one map) that `data` is, each as its bytes. */
export function split(data: Uint8Array): Uint8Array[] {
  const { start, count } = headAt(data, 0);
  const parts: Uint8Array[] = [];
  let position = start;
  for (let i = 0; i < count; i++) {
    const end = skip(data, position);
    parts.push(data.subarray(position, end));
    position = end;
  }
  if (position !== data.length) throw new MsgpackError("more bytes after the value");
  return parts;
}

/** Reads the one value that `data` is; throws `MsgpackError`. */
export function decode(data: Uint8Array): MsgpackValue {
  const reader = new Reader(data);
  const value = reader.value(0);
  if (reader.position !== data.length) throw new MsgpackError("more bytes after the value");
  return value;
}

class Reader {
  position = 0;
  readonly #view: DataView;

  constructor(readonly data: Uint8Array) {
    this.#view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  value(depth: number): MsgpackValue {
    const at = this.position;
    const first = this.data[at];
    if (first !== undefined && first <= 0x7f) {
      this.position += 1;
      return first;
    }
    const head = headAt(this.data, at);
    this.position = head.start + head.size;
    if (head.kind !== "value" && depth >= MAX_DEPTH) throw new MsgpackError("nested too deeply", true);
    if (head.kind === "array") {
      const items: MsgpackValue[] = [];
      for (let i = 0; i < head.count; i++) items.push(this.value(depth + 1));
      return items;
    }
    if (head.kind === "map") {
      const items = new Map<MsgpackValue, MsgpackValue>();
      for (let i = 0; i < head.count; i += 2) {
        const key = this.value(depth + 1);
        const item = this.value(depth + 1);
        if (!canBeKey(key)) throw new MsgpackError("a map or an extension value as the key of a map");
        items.set(key, item);
      }
      return items;
    }
    return this.#scalar(first!, head);
  }

  #scalar(first: number, { start, size }: Head): MsgpackValue {
    const view = this.#view;
    const bytes = (): Uint8Array => this.data.slice(start, start + size);
    if (first >= 0xe0) return first - 0x100;
    if (first <= 0xbf || (first >= 0xd9 && first <= 0xdb)) {
      try {
        return utf8.decode(this.data.subarray(start, start + size));
      } catch {
        throw new MsgpackError("text that is not UTF-8");
      }
    }
    switch (first) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xca:
        return new MsgpackFloat(view.getFloat32(start));
      case 0xcb:
        return new MsgpackFloat(view.getFloat64(start));
      case 0xcc:
        return view.getUint8(start);
      case 0xcd:
        return view.getUint16(start);
      case 0xce:
        return view.getUint32(start);
      case 0xcf:
        return compact(view.getBigUint64(start));
      case 0xd0:
        return view.getInt8(start);
      case 0xd1:
        return view.getInt16(start);
      case 0xd2:
        return view.getInt32(start);
      case 0xd3:
        return compact(view.getBigInt64(start));
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return bytes();
      default: {
        const data = bytes();
        const type = (data[0]! << 24) >> 24;
        return new MsgpackExt(type, type === TIMESTAMP ? timestamp(data.subarray(1)) : data.subarray(1));
      }
    }
  }
}

/** What may stand before a map's value, in an array too: neither a map nor an extension value but a timestamp. */
function canBeKey(value: MsgpackValue): boolean {
  if (Array.isArray(value)) return (value as readonly MsgpackValue[]).every(canBeKey);
  if (value instanceof MsgpackExt) return value.type === TIMESTAMP;
  return !(value instanceof Map);
}

const TIMESTAMP = -1;
/** The years 1 to 9999. */
const FIRST_SECOND = -62135596800n;
const LAST_SECOND = 253402300799n;

/** Returns a timestamp rounded to the microsecond, in its shortest form. */
function timestamp(data: Uint8Array): Uint8Array {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  let seconds: bigint;
  let nanoseconds = 0n;
  if (data.length === 4) seconds = BigInt(view.getUint32(0));
  else if (data.length === 8) {
    const bits = view.getBigUint64(0);
    seconds = BigInt.asUintN(34, bits);
    nanoseconds = bits >> 34n;
  } else if (data.length === 12) {
    nanoseconds = BigInt(view.getUint32(0));
    seconds = view.getBigInt64(4);
  } else throw new MsgpackError("malformed timestamp");
  const outside = (): boolean => seconds < FIRST_SECOND || seconds > LAST_SECOND;
  if (nanoseconds > 999_999_999n || outside()) throw new MsgpackError("malformed timestamp");
  nanoseconds = ((nanoseconds + 500n) / 1000n) * 1000n;
  if (nanoseconds === 1_000_000_000n) {
    seconds += 1n;
    nanoseconds = 0n;
    if (outside()) throw new MsgpackError("malformed timestamp");
  }
  const out = new DataView(new ArrayBuffer(12));
  if (seconds < 0n || seconds >> 34n) {
    out.setUint32(0, Number(nanoseconds));
    out.setBigInt64(4, seconds);
    return new Uint8Array(out.buffer);
  }
  const bits = (nanoseconds << 34n) | seconds;
  if (bits >> 32n) {
    out.setBigUint64(0, bits);
    return new Uint8Array(out.buffer, 0, 8);
  }
  out.setUint32(0, Number(bits));
  return new Uint8Array(out.buffer, 0, 4);
}
