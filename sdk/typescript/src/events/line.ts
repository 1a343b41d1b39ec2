/** Event lines: `{"id":..,"decode":"<hex>"}` is answered `{"id":..,"batch":{...}}`. */

import { kindOf } from "../contract.js";
import { KvHashError } from "../errors.js";
import { JsonFloat, type Json, type JsonLike } from "../json.js";
import { fromHex, toHex } from "../values.js";
import { decodeBatch } from "./decode.js";
import { MsgpackExt, MsgpackFloat, type MsgpackValue } from "./msgpack.js";
import type { Event, EventBatch, Extra, HashValue } from "./types.js";

/** Answers the object of an event line, without `id`; throws `KvHashError`s. */
export function decodeLine(line: ReadonlyMap<string, Json>): { readonly batch: JsonLike } {
  for (const name of line.keys()) {
    if (name !== "id" && name !== "decode") {
      throw new KvHashError("invalid-request", `unknown field ${JSON.stringify(name)}; expected: id, decode`, "$");
    }
  }
  const hex = line.get("decode");
  const payload = typeof hex === "string" ? fromHex(hex) : null;
  if (payload === null) {
    throw new KvHashError("invalid-request", `expected the payload as hex, got ${kindOf(hex)}`, "$.decode");
  }
  return { batch: jsonBatch(decodeBatch(payload)) };
}

/**
 * Returns a batch as event lines carry it: hashes as decimal text or `{"bytes": hex}`, fields by vLLM's names, null
 * ones left out of events.
 */
export function jsonBatch(batch: EventBatch): JsonLike {
  return {
    ts: jsonFloat(batch.ts),
    data_parallel_rank: batch.dataParallelRank,
    layout: batch.layout,
    events: batch.events.map(jsonEvent),
    ...(batch.extra === null ? {} : { extra: jsonExtra(batch.extra) }),
  };
}

function jsonEvent(event: Event): JsonLike {
  const result = new Map<string, JsonLike>([["type", event.type]]);
  const add = (fields: { readonly [name: string]: JsonLike }): void => {
    for (const [name, value] of Object.entries(fields)) if (value !== null) result.set(name, value);
  };
  switch (event.type) {
    case "BlockStored":
      add({
        block_hashes: event.blockHashes.map(jsonHashValue),
        parent_block_hash: event.parentBlockHash === null ? null : jsonHashValue(event.parentBlockHash),
        token_ids: event.tokenIds as JsonLike,
        block_size: event.blockSize,
        lora_id: event.loraId,
        medium: event.medium,
        lora_name: event.loraName,
        extra_keys: event.extraKeys === null ? null : event.extraKeys.map((keys) => jsonValue(keys)),
        group_idx: event.groupIdx,
        kv_cache_spec_kind: event.kvCacheSpecKind,
        kv_cache_spec_sliding_window: event.kvCacheSpecSlidingWindow,
        locality: event.locality,
        ownership: event.ownership,
        session_id: event.sessionId,
        lookahead_token_ids: event.lookaheadTokenIds,
        cache_salt: event.cacheSalt,
        extra: jsonExtra(event.extra),
      });
      break;
    case "BlockRemoved":
      add({
        block_hashes: event.blockHashes.map(jsonHashValue),
        medium: event.medium,
        group_idx: event.groupIdx,
        locality: event.locality,
        ownership: event.ownership,
        extra: jsonExtra(event.extra),
      });
      break;
    case "AllBlocksCleared":
      add({ extra: jsonExtra(event.extra) });
      break;
    case "UnknownEvent":
      add({ tag: event.tag, raw: toHex(event.raw) });
      break;
    case "UndecodableEvent":
      add({ path: event.path, tag: event.tag, message: event.message, raw: toHex(event.raw) });
  }
  return result;
}

function jsonHashValue(value: HashValue): JsonLike {
  return typeof value === "bigint" ? value.toString() : { bytes: toHex(value) };
}

function jsonExtra(extra: Extra): JsonLike {
  return extra === null ? null : new Map([...extra].map(([name, value]) => [String(name), jsonValue(value)]));
}

function jsonFloat(value: number): JsonLike {
  // JSON has no infinities; a time or field that is one is shown as text.
  if (!Number.isFinite(value)) return String(value);
  return new JsonFloat(Number.isInteger(value) && Math.abs(value) < 1e21 ? `${value}.0` : String(value));
}

function jsonValue(value: MsgpackValue): JsonLike {
  if (value instanceof Uint8Array) return { bytes: toHex(value) };
  if (value instanceof MsgpackFloat) return jsonFloat(value.value);
  if (value instanceof MsgpackExt) return { ext: value.type, bytes: toHex(value.data) };
  if (value instanceof Map) {
    return new Map([...value].map(([name, item]) => [String(name), jsonValue(item as MsgpackValue)]));
  }
  if (Array.isArray(value)) return value.map((item) => jsonValue(item as MsgpackValue));
  return value as JsonLike;
}
