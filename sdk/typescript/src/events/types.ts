/**
 * The events: one type for each, with every field of every vLLM release and of SGLang.
 *
 * A field that a release does not have, or that the publisher left out, is null. Integers on the wire are `bigint`
 * where they are a hash, else `number` where that is exact and `bigint` where not.
 */

import { low64 } from "../block-hash.js";
import type { Int } from "../values.js";
import type { MsgpackValue } from "./msgpack.js";

/** A block hash as on the wire: a 64-bit integer, signed or not, or the digest's bytes. */
export type HashValue = bigint | Uint8Array;

/** Fields that are not known: by name from a map, by position (the tag is 0) from an array. Null where none. */
export type Extra = ReadonlyMap<string | number, MsgpackValue> | null;

/** Blocks entered a cache: one hash a block, chained after the parent (null: they start a prompt). */
export interface BlockStored {
  readonly type: "BlockStored";
  readonly blockHashes: readonly HashValue[];
  readonly parentBlockHash: HashValue | null;
  /** The tokens of all the blocks; SGLang with EAGLE has pairs instead. */
  readonly tokenIds: readonly Int[] | readonly (readonly [Int, Int])[];
  readonly blockSize: Int;
  readonly loraId: Int | null;
  readonly medium: string | null;
  readonly loraName: string | null;
  /** Per block null or what else its hash covers, untagged. */
  readonly extraKeys: readonly (readonly MsgpackValue[] | null)[] | null;
  readonly groupIdx: Int | null;
  readonly kvCacheSpecKind: string | null;
  readonly kvCacheSpecSlidingWindow: Int | null;
  readonly locality: string | null;
  readonly ownership: string | null;
  readonly sessionId: string | null;
  readonly lookaheadTokenIds: readonly (readonly Int[])[] | null;
  /** SGLang's. */
  readonly cacheSalt: string | null;
  readonly extra: Extra;
}

/** Blocks left a cache. */
export interface BlockRemoved {
  readonly type: "BlockRemoved";
  readonly blockHashes: readonly HashValue[];
  readonly medium: string | null;
  readonly groupIdx: Int | null;
  readonly locality: string | null;
  readonly ownership: string | null;
  readonly extra: Extra;
}

/** The whole prefix cache was dropped, every tier and group. */
export interface AllBlocksCleared {
  readonly type: "AllBlocksCleared";
  readonly extra: Extra;
}

/** An event whose tag is not known; `raw` is its msgpack. */
export interface UnknownEvent {
  readonly type: "UnknownEvent";
  readonly tag: string;
  readonly raw: Uint8Array;
}

/** An event that cannot be read, in its place among the others of its batch. */
export interface UndecodableEvent {
  readonly type: "UndecodableEvent";
  /** Where: `$.events[2].block_hashes[0]`. */
  readonly path: string;
  readonly message: string;
  readonly raw: Uint8Array;
  /** The event's tag where that could be read. */
  readonly tag: string | null;
}

export type Event = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent | UndecodableEvent;

/** One published message: the events of one engine step, in order. */
export interface EventBatch {
  /** Seconds since the epoch, by the engine's clock. */
  readonly ts: number;
  readonly events: readonly Event[];
  readonly dataParallelRank: Int | null;
  /** How the events were written; null when there was none to tell it by. */
  readonly layout: "array" | "map" | "mixed" | null;
  /** What the batch holds besides, by name or position. */
  readonly extra: Extra;
}

/** Returns one key for a block hash in any of its wire forms: its low 64 bits, unsigned. */
export function hashKey(value: HashValue): bigint {
  return low64(value);
}
