/** The SDK answers the corpus: vectors/ of the repository, or the folder that KVHASH_VECTORS names. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import {
  BlockHasher,
  JsonFloat,
  KvHashError,
  Ref,
  answerLine,
  coarserHashes,
  decodeLine,
  encodeCbor,
  encodePickle5,
  externalHash,
  jsonHash,
  makeBlockHashWithGroupId,
  parseJson,
  resolveBlockSizes,
  toHex,
  type BlockHash,
  type Json,
  type Value,
  writeJson,
} from "../src/index.js";
import { sha256, xxh3_128 } from "../src/digest.js";
import { fromHex } from "../src/values.js";

type Fields = Map<string, Json>;

const FOLDER = process.env.KVHASH_VECTORS ?? fileURLToPath(new URL("../../../../vectors", import.meta.url));

function vectors(kind: string): Fields[] {
  const file = parseJson(readFileSync(`${FOLDER}/${kind}.json`, "utf8")) as Fields;
  const found = file.get("vectors") as Fields[];
  assert.ok(found.length > 0);
  return found;
}

const inputOf = (vector: Fields): Fields => vector.get("input") as Fields;
const idOf = (vector: Fields): string => vector.get("id") as string;

/** The bytes of a generated input: SHA-256(seed || counter), one after the other. */
class Stream {
  #counter = 0n;
  #left = Buffer.alloc(0);

  constructor(readonly seed: string) {}

  token(vocabulary: number): number {
    if (this.#left.length === 0) {
      const counter = Buffer.alloc(8);
      counter.writeBigUInt64BE(this.#counter++);
      this.#left = createHash("sha256").update(this.seed).update(counter).digest();
    }
    const next = this.#left.readUInt32BE();
    this.#left = this.#left.subarray(4);
    return next % vocabulary;
  }
}

function generated(spec: Fields): number[] {
  const stream = new Stream(spec.get("seed") as string);
  return Array.from({ length: spec.get("count") as number }, () => stream.token(spec.get("vocabulary") as number));
}

/** A plain form in which equal answers are equal: nil fields, ids and messages for people are dropped. */
function plain(value: Json): unknown {
  if (value instanceof JsonFloat) return Number(value.text);
  if (Array.isArray(value)) return value.map(plain);
  if (!(value instanceof Map)) return typeof value === "bigint" ? String(value) : value;
  const kept = [...value].filter(([name, item]) => item !== null && name !== "id" && name !== "message");
  return Object.fromEntries(kept.map(([name, item]) => [name, plain(item)]));
}

function check(vector: Fields, line: string): void {
  const text = answerLine(Buffer.from(line), new Map([["decode", decodeLine]]));
  assert.ok(text !== null);
  const got = parseJson(text) as Fields;
  const expected = vector.get("expected") as Fields;
  const refusal = expected.get("error") as Fields | undefined;
  if (refusal) {
    const error = got.get("error") as Fields | undefined;
    assert.ok((refusal.get("codes") as string[]).includes(error?.get("code") as string), `${idOf(vector)}: ${text.slice(0, 300)}`);
    return;
  }
  const choices = ((vector.get("accepted") as Json[] | undefined) ?? [expected]).map(plain);
  const answered = plain(got);
  const found = choices.some((choice) => {
    try {
      assert.deepStrictEqual(answered, choice);
      return true;
    } catch {
      return false;
    }
  });
  assert.ok(found, `${idOf(vector)}: answered ${text.slice(0, 600)}, want ${writeJson(expected).slice(0, 600)}`);
}

for (const kind of ["none_hash", "chains", "extra_keys", "lookahead", "context_parallel", "recorded", "requests"]) {
  test(`requests of ${kind} are answered as the corpus says`, () => {
    let asked = 0;
    for (const vector of vectors(kind)) {
      const input = inputOf(vector);
      const line = input.get("line");
      if (typeof line === "string") {
        check(vector, line);
        asked += 1;
        continue;
      }
      const request = new Map(input.get("request") as Fields);
      const tokens = request.get("tokens");
      if (tokens instanceof Map) request.set("tokens", generated(tokens.get("generate") as Fields));
      for (const release of input.get("vllm") as string[]) {
        check(vector, writeJson(new Map([["id", "1"], ["vllm", release], ...request])));
        asked += 1;
      }
    }
    assert.ok(asked >= 50);
  });
}

test("event batches decode to what the corpus says", () => {
  for (const vector of vectors("events")) check(vector, `{"id":"1","decode":"${inputOf(vector).get("payload")}"}`);
});

function valueOf(json: Json, same: Map<Json, Ref>): Value {
  if (json === null) return null;
  if (Array.isArray(json)) return json.map((item) => valueOf(item, same));
  const fields = json as Fields;
  if (fields.has("int")) return BigInt(fields.get("int") as string);
  if (fields.has("bytes")) return fromHex(fields.get("bytes") as string);
  if (fields.has("repeat")) return (fields.get("repeat") as string).repeat(fields.get("count") as number);
  if (fields.has("tokens")) return generated(fields.get("tokens") as Fields);
  if (!fields.has("same")) return fields.get("text") as string;
  const number = fields.get("same")!;
  if (!same.has(number)) same.set(number, new Ref(fields.get("text") as string));
  return same.get(number)!;
}

test("every preimage is serialized byte for byte", () => {
  for (const vector of vectors("serialization")) {
    const input = inputOf(vector);
    const encode = input.get("serialization") === "cbor" ? encodeCbor : encodePickle5;
    const bytes = encode(valueOf(input.get("value")!, new Map()));
    const serialized = vector.get("serialized");
    if (serialized !== undefined) assert.equal(toHex(bytes), serialized, idOf(vector));
    const digests = new Map([["sha256", toHex(sha256(bytes))], ["xxh3_128", toHex(xxh3_128(bytes))]]);
    assert.deepEqual([bytes.length, digests], [vector.get("serialized_length"), vector.get("digests")], idOf(vector));
  }
});

test("published forms are what the corpus says", () => {
  for (const vector of vectors("external")) {
    const input = inputOf(vector);
    const hash: BlockHash = input.has("int") ? BigInt(input.get("int") as string) : fromHex(input.get("digest") as string)!;
    let got: Record<string, string> = { uint64: String(externalHash(hash)) };
    if (hash instanceof Uint8Array) {
      got = { ...got, int64: String(externalHash(hash, "int64")), bytes: toHex(hash) };
      const group = input.get("group_id");
      if (group !== undefined) got = { with_group_id: toHex(makeBlockHashWithGroupId(hash, group as number)) };
    }
    assert.deepEqual(got, plain(vector.get("expected")!), idOf(vector));
  }
});

test("coarser views and block sizes are what the corpus says", () => {
  for (const vector of vectors("block_size")) {
    const input = inputOf(vector);
    const run = (): unknown => {
      if (input.has("factor")) {
        const hashes = (input.get("hashes") as Json[]).map((hash) =>
          hash instanceof Map ? BigInt(hash.get("int") as string) : fromHex(hash as string)!,
        );
        return { hashes: coarserHashes<BlockHash>(hashes, input.get("factor") as number).map(jsonHash) };
      }
      const override = input.get("hash_block_size") as number | null;
      const sizes = resolveBlockSizes(input.get("groups") as number[], {
        ...(override === null ? {} : { hashBlockSize: override }),
        decodeContextParallelSize: input.get("decode_context_parallel_size") as number,
        unscaledGroups: input.get("unscaled_groups") as number[],
      });
      return {
        groups: [...sizes.groups],
        hash_block_size: sizes.hashBlockSize,
        scheduler_block_size: sizes.schedulerBlockSize,
      };
    };
    if (vector.get("result") === "invalid") assert.throws(run, KvHashError, idOf(vector));
    else assert.deepEqual(run(), plain(vector.get("expected")!), idOf(vector));
  }
});

test("a thousand blocks of each algorithm end in one digest", () => {
  for (const vector of vectors("accumulated")) {
    const input = inputOf(vector);
    const number = (name: string): number => input.get(name) as number;
    // The larger ones, 100,000 blocks, take most of a minute in JavaScript; the Go tests and the generator have them.
    if (number("chains") > 10) continue;
    for (const vllm of input.get("vllm") as string[]) {
      const stream = new Stream(input.get("stream") as string);
      const total = createHash("sha256");
      for (let k = 0; k < number("chains"); k++) {
        const algorithm = input.get("algorithm") as string;
        const hasher = new BlockHasher({ vllm, algorithm, blockSize: number("block_size"), hashSeed: String(k) });
        const count = number("blocks") * number("block_size");
        const tokens = Array.from({ length: count }, () => stream.token(number("vocabulary")));
        const options = {
          ...(k % 2 ? { cacheSalt: `salt-${k}` } : {}),
          ...(k && k % 3 === 0 ? { lora: { id: k, name: `lora-${k}`, path: `path-${k}` } } : {}),
        };
        for (const hash of hasher.hashTokens(tokens, options)) {
          total.update(typeof hash === "bigint" ? String(hash) : hash);
        }
      }
      assert.equal(total.digest("hex"), vector.get("digest"), idOf(vector));
    }
  }
});
