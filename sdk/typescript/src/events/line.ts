/** Event lines: `{"id":..,"decode":"<hex>"}` is answered `{"id":..,"batch":{...}}`. */

import { kindOf } from "../contract.js";
import { KvHashError } from "../errors.js";
import { type Json, type JsonLike } from "../json.js";
import { toHex } from "../values.js";
import { decodeBatch } from "./decode.js";
import type { EventBatch } from "./types.js";

/** Answers the object of an event line, without `id`; throws `KvHashError`s. */
export function decodeLine(line: ReadonlyMap<string, Json>): { readonly batch: JsonLike } {
  const payload = line.get("decode");
  if (typeof payload !== "string" || !/^(?:[0-9a-fA-F]{2})*$/.test(payload)) {
    throw new KvHashError("invalid-request", `expected the payload as hex, got ${kindOf(payload)}`, "$.decode");
  }
  const bytes = Uint8Array.from(payload.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
  return { batch: jsonBatch(decodeBatch(bytes)) };
}

/** Returns a batch as event lines carry it. */
export function jsonBatch(batch: EventBatch): JsonLike {
  return { ts: batch.ts, raw: toHex(new Uint8Array()) };
}
