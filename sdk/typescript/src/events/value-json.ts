/** The values of events as JSON, as event lines carry them. */

import { JsonFloat, writeJson, type JsonLike } from "../json.js";
import { toHex } from "../values.js";
import { MsgpackExt, MsgpackFloat, type MsgpackValue } from "./msgpack.js";
import type { Extra } from "./types.js";

/** A float stays one, and what JSON has not is named. */
export function jsonFloat(value: number): JsonLike {
  // JSON has no such numbers.
  if (Number.isNaN(value)) return { float: "NaN" };
  if (!Number.isFinite(value)) return { float: value > 0 ? "+Inf" : "-Inf" };
  // A float stays one: 1.0, not 1.
  const text = Object.is(value, -0) ? "-0" : String(value);
  return new JsonFloat(/^-?[0-9]+$/.test(text) ? `${text}.0` : text);
}

/** The text by which JSON names a map's key: a key that is no text by its own JSON. */
export function jsonName(key: MsgpackValue): string {
  return typeof key === "string" ? key : writeJson(jsonValue(key));
}

/** A value of an event as event lines carry it: bytes as `{"bytes": hex}`, an extension as `{"ext": type, "bytes": hex}`. */
export function jsonValue(value: MsgpackValue | Exclude<Extra, null>): JsonLike {
  if (value instanceof Uint8Array) return { bytes: toHex(value) };
  if (value instanceof MsgpackFloat) return jsonFloat(value.value);
  if (value instanceof MsgpackExt) return { ext: value.type, bytes: toHex(value.data) };
  if (value instanceof Map) {
    return new Map([...value].map(([name, item]) => [jsonName(name), jsonValue(item as MsgpackValue)]));
  }
  if (Array.isArray(value)) return value.map((item) => jsonValue(item as MsgpackValue));
  return value as JsonLike;
}
