/** Event lines: `{"id":..,"decode":"<hex>"}` is answered `{"id":..,"batch":{...}}`. */

import { kindOf } from "../contract.js";
import { KvHashError } from "../errors.js";
import type { Json, JsonLike } from "../json.js";
import { fromHex } from "../values.js";
import { decodeBatch } from "./decode.js";
import type { Event, EventBatch, Extra, HashValue } from "./types.js";
import { jsonFloat, jsonValue } from "./value-json.js";

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
 * Returns a batch as event lines carry it: every field of each event by vLLM's name, nil as null; a hash as
 * `{"int": decimal}`, bytes as `{"bytes": hex}`; `extra` only where there are unknown fields. An unknown event is
 * `{"unknown": tag, "raw": ...}`, an undecodable one `{"undecodable": path, "message": ..., "raw": ...}`.
 */
export function jsonBatch(batch: EventBatch): JsonLike {
  return {
    ts: jsonFloat(batch.ts),
    data_parallel_rank: batch.dataParallelRank,
    layout: batch.layout,
    events: batch.events.map(jsonEvent),
    ...jsonExtra(batch.extra),
  };
}

function jsonEvent(event: Event): JsonLike {
  switch (event.type) {
    case "BlockStored":
      return {
        type: event.type,
        block_hashes: event.blockHashes.map(jsonHashValue),
        parent_block_hash: event.parentBlockHash === null ? null : jsonHashValue(event.parentBlockHash),
        token_ids: event.tokenIds as JsonLike,
        block_size: event.blockSize,
        lora_id: event.loraId,
        medium: event.medium,
        lora_name: event.loraName,
        extra_keys: event.extraKeys === null ? null : jsonValue(event.extraKeys),
        group_idx: event.groupIdx,
        kv_cache_spec_kind: event.kvCacheSpecKind,
        kv_cache_spec_sliding_window: event.kvCacheSpecSlidingWindow,
        locality: event.locality,
        ownership: event.ownership,
        session_id: event.sessionId,
        lookahead_token_ids: event.lookaheadTokenIds,
        cache_salt: event.cacheSalt,
        ...jsonExtra(event.extra),
      };
    case "BlockRemoved":
      return {
        type: event.type,
        block_hashes: event.blockHashes.map(jsonHashValue),
        medium: event.medium,
        group_idx: event.groupIdx,
        locality: event.locality,
        ownership: event.ownership,
        ...jsonExtra(event.extra),
      };
    case "AllBlocksCleared":
      return { type: event.type, ...jsonExtra(event.extra) };
    case "UnknownEvent":
      return { unknown: event.tag, raw: jsonValue(event.raw) };
    case "UndecodableEvent":
      return { undecodable: event.path, message: event.message, raw: jsonValue(event.raw) };
  }
}

function jsonHashValue(value: HashValue): JsonLike {
  return typeof value === "bigint" ? { int: value.toString() } : jsonValue(value);
}

function jsonExtra(extra: Extra): { readonly extra?: JsonLike } {
  return extra === null ? {} : { extra: jsonValue(extra) };
}
