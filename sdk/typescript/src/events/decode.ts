/**
 * Reads any published batch: every vLLM release's shape and SGLang's, array, map or mixed.
 *
 * A field's meaning comes from its name or its place, never from its value's type. One bad event does not lose its
 * batch: it becomes an `UndecodableEvent` in place. A payload that is no batch throws a `DecodeError`.
 */

import { Contract } from "../contract.js";
import { DecodeError } from "../errors.js";
import type { Int } from "../values.js";
import { MsgpackError, MsgpackFloat, decode, isArray, isMap, split, type MsgpackValue } from "./msgpack.js";
import type { BlockRemoved, BlockStored, Event, EventBatch, Extra, HashValue } from "./types.js";
import { jsonName } from "./value-json.js";

/** The largest payload that is read, in bytes. */
export const MAX_PAYLOAD_BYTES = 256 * 1024 * 1024;

const NEWEST = Contract.forVllm("latest").events;
const PLACES: ReadonlyMap<string, readonly string[]> = new Map([
  ["BlockStored", NEWEST.blockStored.map((field) => field.name)],
  ["BlockRemoved", NEWEST.blockRemoved.map((field) => field.name)],
]);

type Fields = Map<string | number, MsgpackValue>;

/**
 * Reads the payload frame of one published message.
 *
 * Throws a `DecodeError` when it is no batch: `invalid-msgpack`, `nested-too-deeply`, `payload-too-large` or
 * `invalid-batch`. Time and memory are bounded by the payload's length, whatever lengths it declares.
 */
export function decodeBatch(payload: Uint8Array): EventBatch {
  if (payload.length > MAX_PAYLOAD_BYTES) {
    throw new DecodeError(
      "payload-too-large",
      `the payload has ${payload.length} bytes; at most ${MAX_PAYLOAD_BYTES} are read`,
      "$",
    );
  }
  if (payload.length === 0) {
    throw new DecodeError("invalid-batch", "the payload is empty; expected a msgpack array [ts, [events], rank]", "$");
  }
  const { ts, events, rank, extra } = isMap(payload) ? mapContainer(payload) : arrayContainer(payload);
  if (!isInt(ts) && !(ts instanceof MsgpackFloat)) {
    throw new DecodeError("invalid-batch", `expected the time as a number, got ${kind(ts)}`, "$.ts");
  }
  if (rank !== null && !isInt(rank)) {
    throw new DecodeError(
      "invalid-batch",
      `expected the data parallel rank as an integer or nil, got ${kind(rank)}`,
      "$.data_parallel_rank",
    );
  }
  return {
    ts: ts instanceof MsgpackFloat ? ts.value : Number(ts),
    events: events.map((raw, i) => decodeEvent(raw, `$.events[${i}]`)),
    dataParallelRank: rank,
    layout: layoutOf(events),
    extra: extra.size ? extra : null,
  };
}

interface Container {
  readonly ts: MsgpackValue;
  readonly events: readonly Uint8Array[];
  readonly rank: MsgpackValue;
  readonly extra: Fields;
}

function arrayContainer(payload: Uint8Array): Container {
  if (!isArray(payload)) {
    const got = kind(guarded(() => decode(payload), "$"));
    throw new DecodeError("invalid-batch", `expected a msgpack array [ts, [events], rank], got ${got}`, "$");
  }
  const parts = guarded(() => split(payload), "$");
  const [first, second, third, ...more] = parts;
  if (first === undefined || second === undefined) {
    throw new DecodeError(
      "invalid-batch",
      `expected an array [ts, [events], rank] of at least 2 elements, got ${parts.length}`,
      "$",
    );
  }
  const rank = third === undefined ? null : guarded(() => decode(third), "$.data_parallel_rank");
  const extra: Fields = new Map(more.map((part, i) => [i + 3, guarded(() => decode(part), `$[${i + 3}]`)]));
  return { ts: guarded(() => decode(first), "$.ts"), events: eventList(second), rank, extra };
}

function mapContainer(payload: Uint8Array): Container {
  const parts = guarded(() => split(payload), "$");
  const raws = new Map<string, Uint8Array>();
  for (let i = 0; i < parts.length; i += 2) {
    const name = guarded(() => decode(parts[i]!), "$");
    if (typeof name !== "string") {
      throw new DecodeError("invalid-msgpack", `not msgpack: a field name that is ${kind(name)}`, "$");
    }
    raws.set(name, parts[i + 1]!);
  }
  for (const name of ["ts", "events"]) {
    if (!raws.has(name)) throw new DecodeError("invalid-batch", `the batch has no '${name}'`, "$");
  }
  const events = eventList(raws.get("events")!);
  raws.delete("events");
  const extra: Fields = new Map();
  for (const [name, raw] of raws) extra.set(name, guarded(() => decode(raw), `$.${name}`));
  const take = (name: string): MsgpackValue => {
    const value = extra.get(name) ?? null;
    extra.delete(name);
    return value;
  };
  const rank = take("data_parallel_rank");
  const other = take("attn_dp_rank");
  return { ts: take("ts"), events, rank: rank ?? other, extra };
}

function eventList(raw: Uint8Array): readonly Uint8Array[] {
  if (!isArray(raw)) {
    const got = kind(guarded(() => decode(raw), "$.events"));
    throw new DecodeError("invalid-batch", `expected a list of events, got ${got}`, "$.events");
  }
  return guarded(() => split(raw), "$.events");
}

function guarded<T>(read: () => T, at: string): T {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof MsgpackError)) throw error;
    if (error.nested) throw new DecodeError("nested-too-deeply", error.message, at);
    throw new DecodeError("invalid-msgpack", `not msgpack: ${error.message}`, at);
  }
}

function layoutOf(events: readonly Uint8Array[]): EventBatch["layout"] {
  const arrays = events.some(isArray);
  const maps = events.some(isMap);
  if (arrays && maps) return "mixed";
  return arrays ? "array" : maps ? "map" : null;
}

/** A field that cannot be; never leaves this module. */
class BadField extends Error {
  constructor(
    message: string,
    readonly path: string,
  ) {
    super(message);
  }
}

function decodeEvent(raw: Uint8Array, at: string): Event {
  let tag: string | null = null;
  try {
    const named = nameFields(parse(raw, at), at, (read) => (tag = read));
    switch (named.tag) {
      case "BlockStored":
        return stored(named.fields, named.extra, at);
      case "BlockRemoved":
        return removed(named.fields, named.extra, at);
      case "AllBlocksCleared":
        return { type: "AllBlocksCleared", extra: extraOf(named.fields, named.extra) };
      default:
        return { type: "UnknownEvent", tag: named.tag, raw: raw.slice() };
    }
  } catch (error) {
    if (!(error instanceof BadField)) throw error;
    return { type: "UndecodableEvent", path: error.path, message: error.message, raw: raw.slice(), tag };
  }
}

function parse(raw: Uint8Array, at: string): MsgpackValue {
  try {
    return decode(raw);
  } catch (error) {
    if (!(error instanceof MsgpackError)) throw error;
    throw new BadField(error.nested ? error.message : `not msgpack: ${error.message}`, at);
  }
}

interface Named {
  readonly tag: string;
  readonly fields: Fields;
  /** Elements past the last known place, by position. */
  readonly extra: Fields;
}

function nameFields(value: MsgpackValue, at: string, onTag: (tag: string) => void): Named {
  if (value instanceof Map) {
    if (!value.has("type")) throw new BadField("the event has no 'type'", at);
    const tag = textTag(value.get("type") as MsgpackValue, `${at}.type`);
    const fields: Fields = new Map();
    for (const [name, item] of value as ReadonlyMap<MsgpackValue, MsgpackValue>) {
      if (typeof name !== "string") throw new BadField(`expected field names as text, got ${kind(name)}`, at);
      if (name !== "type") fields.set(name, item);
    }
    onTag(tag);
    return { tag, fields, extra: new Map() };
  }
  if (!isList(value)) throw new BadField(`expected an event, a map or an array, got ${kind(value)}`, at);
  if (value.length === 0) throw new BadField("expected an event, got an empty array", at);
  const tag = textTag(value[0]!, `${at}[0]`);
  onTag(tag);
  const places = PLACES.get(tag) ?? [];
  const fields: Fields = new Map();
  const extra: Fields = new Map();
  value.forEach((item, i) => {
    if (i === 0) return;
    const name = places[i - 1];
    if (name === undefined) extra.set(i, item);
    else fields.set(name, item);
  });
  const object = fields.get("lora_name");
  if (tag === "BlockStored" && object instanceof Map) {
    // SGLang's array puts an object of named fields here. Its names say what they are, so nothing is guessed.
    fields.delete("lora_name");
    for (const [name, item] of object as ReadonlyMap<MsgpackValue, MsgpackValue>) fields.set(jsonName(name), item);
  }
  return { tag, fields, extra };
}

function textTag(value: MsgpackValue, path: string): string {
  if (typeof value !== "string") throw new BadField(`expected the event's type as text, got ${kind(value)}`, path);
  return value;
}

function stored(fields: Fields, extra: Fields, at: string): BlockStored {
  const take = new Taker(fields, at);
  const blockHashes = take.hashes("block_hashes");
  const parentBlockHash = take.parent("parent_block_hash");
  return {
    type: "BlockStored",
    blockHashes,
    parentBlockHash,
    tokenIds: take.tokens("token_ids"),
    blockSize: take.size("block_size"),
    loraId: take.integer("lora_id"),
    medium: take.text("medium"),
    loraName: take.text("lora_name"),
    extraKeys: take.extraKeys("extra_keys"),
    groupIdx: take.integer("group_idx"),
    kvCacheSpecKind: take.text("kv_cache_spec_kind"),
    kvCacheSpecSlidingWindow: take.integer("kv_cache_spec_sliding_window"),
    locality: take.text("locality"),
    ownership: take.text("ownership"),
    sessionId: take.text("session_id"),
    lookaheadTokenIds: take.lookahead("lookahead_token_ids"),
    cacheSalt: take.text("cache_salt"),
    extra: extraOf(take.left, extra),
  };
}

function removed(fields: Fields, extra: Fields, at: string): BlockRemoved {
  const take = new Taker(fields, at);
  return {
    type: "BlockRemoved",
    blockHashes: take.hashes("block_hashes"),
    medium: take.text("medium"),
    groupIdx: take.integer("group_idx"),
    locality: take.text("locality"),
    ownership: take.text("ownership"),
    extra: extraOf(take.left, extra),
  };
}

function extraOf(named: Fields, positional: Fields): Extra {
  const all = new Map([...named, ...positional]);
  return all.size ? all : null;
}

/** Takes one event's fields one by one, checked; what is `left` over is kept as extra. */
class Taker {
  readonly left: Fields;
  #hashKind: "an integer" | "bytes" | null = null;

  constructor(
    fields: Fields,
    readonly at: string,
  ) {
    this.left = new Map(fields);
  }

  integer(name: string): Int | null {
    const value = this.#take(name) ?? null;
    if (value === null || isInt(value)) return value;
    throw this.#bad("an integer or nil", value, `${this.at}.${name}`);
  }

  text(name: string): string | null {
    const value = this.#take(name) ?? null;
    if (value === null || typeof value === "string") return value;
    throw this.#bad("text or nil", value, `${this.at}.${name}`);
  }

  size(name: string): Int {
    const value = this.#required(name);
    if (!isInt(value)) throw this.#bad("an integer", value, `${this.at}.${name}`);
    if (value < 0) throw new BadField(`expected a size of at least 0, got ${value}`, `${this.at}.${name}`);
    return value;
  }

  hashes(name: string): HashValue[] {
    const value = this.#list(this.#required(name), "block hashes", name);
    return value.map((item, i) => this.#hash(item, `${this.at}.${name}[${i}]`));
  }

  parent(name: string): HashValue | null {
    const value = this.#required(name);
    return value === null ? null : this.#hash(value, `${this.at}.${name}`);
  }

  tokens(name: string): Int[] | [Int, Int][] {
    const value = this.#list(this.#required(name), "token ids", name);
    const pairs = isList(value[0] ?? null);
    value.forEach((item, i) => {
      const good = pairs ? isList(item) && item.length === 2 && item.every(isInt) : isInt(item);
      if (!good) throw this.#bad(pairs ? "a pair of token ids" : "a token id", item, `${this.at}.${name}[${i}]`);
    });
    return [...value] as Int[] | [Int, Int][];
  }

  lookahead(name: string): Int[][] | null {
    const value = this.#take(name) ?? null;
    if (value === null) return null;
    return this.#list(value, "token ids per block", name).map((item, i) => {
      const path = `${this.at}.${name}[${i}]`;
      if (!isList(item)) throw this.#bad("a list of token ids", item, path);
      return item.map((token, j) => {
        if (!isInt(token)) throw this.#bad("a token id", token, `${path}[${j}]`);
        return token;
      });
    });
  }

  extraKeys(name: string): (readonly MsgpackValue[] | null)[] | null {
    const value = this.#take(name) ?? null;
    if (value === null) return null;
    return this.#list(value, "extra keys per block", name).map((item, i) => {
      if (item === null || isList(item)) return item;
      throw this.#bad("a list of keys or nil", item, `${this.at}.${name}[${i}]`);
    });
  }

  #take(name: string): MsgpackValue | undefined {
    const value = this.left.get(name);
    this.left.delete(name);
    return value;
  }

  #required(name: string): MsgpackValue {
    const value = this.#take(name);
    if (value === undefined) throw new BadField(`the event has no '${name}'`, this.at);
    return value;
  }

  #list(value: MsgpackValue, what: string, name: string): readonly MsgpackValue[] {
    if (!isList(value)) throw this.#bad(`a list of ${what}`, value, `${this.at}.${name}`);
    return value;
  }

  #hash(value: MsgpackValue, path: string): HashValue {
    const isBytes = value instanceof Uint8Array;
    if (!isBytes && !isInt(value)) throw this.#bad("a block hash, an integer or bytes", value, path);
    if (isBytes && (value.length < 8 || value.length > 64)) {
      throw new BadField(`expected a block hash of 8 to 64 bytes, got ${value.length}`, path);
    }
    const own = isBytes ? "bytes" : "an integer";
    this.#hashKind ??= own;
    if (this.#hashKind !== own) {
      throw new BadField(`got ${own} where the other hashes of the event are ${this.#hashKind}`, path);
    }
    return isBytes ? value : BigInt(value);
  }

  #bad(what: string, value: MsgpackValue, path: string): BadField {
    return new BadField(`expected ${what}, got ${kind(value)}`, path);
  }
}

function isInt(value: MsgpackValue): value is Int {
  return typeof value === "number" || typeof value === "bigint";
}

function isList(value: MsgpackValue): value is readonly MsgpackValue[] {
  return Array.isArray(value);
}

function kind(value: MsgpackValue): string {
  if (value === null) return "nil";
  if (typeof value === "boolean") return "a boolean";
  if (isInt(value)) return "an integer";
  if (typeof value === "string") return "text";
  if (value instanceof MsgpackFloat) return "a float";
  if (value instanceof Uint8Array) return "bytes";
  if (isList(value)) return "an array";
  return value instanceof Map ? "a map" : "an extension value";
}
