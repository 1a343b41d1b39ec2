/** The API: chains that grow, views, published forms, refusals. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  BlockHasher,
  Contract,
  KvHashError,
  coarserHashes,
  decodeBatch,
  externalHash,
  getBlockHash,
  getGroupId,
  hashKey,
  makeBlockHashWithGroupId,
  resolveBlockSizes,
  toHex,
  type BlockHash,
} from "../src/index.js";

const hex = (hash: BlockHash): string => (typeof hash === "bigint" ? String(hash) : toHex(hash));
const code = (expected: string) => (error: unknown) => error instanceof KvHashError && error.code === expected;
const settings = { vllm: "0.33.0", algorithm: "sha256_cbor", blockSize: 4, hashSeed: "0" };

test("the README's hash is this one", () => {
  const hashes = new BlockHasher(settings).hashTokens([1, 2, 3, 4]);
  assert.deepEqual(hashes.map(hex), ["c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb"]);
});

test("a chain grown in any pieces equals the whole prompt's", () => {
  const options = { cacheSalt: "t", multimodal: [{ identifier: "i", offset: 3, length: 9 }], lora: { name: "a", path: "p" } };
  for (const lookahead of [0, 1, 3]) {
    const hasher = new BlockHasher({ ...settings, lookahead });
    const tokens = Array.from({ length: 23 }, (_, i) => i * 7);
    const whole = hasher.hashTokens(tokens, options).map(hex);
    for (const size of [1, 3, 4, 9]) {
      const chain = hasher.chain(null, options);
      const grown: BlockHash[] = [];
      for (let i = 0; i < tokens.length; i += size) grown.push(...chain.append(tokens.slice(i, i + size)));
      assert.deepEqual(grown.map(hex), whole);
      assert.equal(chain.numTokens, 23);
    }
  }
});

test("typed arrays and bigints hash as the same numbers", () => {
  const hasher = new BlockHasher(settings);
  const expected = hasher.hashTokens([1, 2, 300, 70000]).map(hex);
  assert.deepEqual(hasher.hashTokens(new Uint32Array([1, 2, 300, 70000])).map(hex), expected);
  assert.deepEqual(hasher.hashTokens([1n, 2n, 300n, 70000n]).map(hex), expected);
});

test("a refused append leaves the chain as it was", () => {
  const chain = new BlockHasher(settings).chain([1, 2, 3]);
  for (const bad of [-1, 1.5, 2 ** 53, 2n ** 64n, Number.NaN]) {
    assert.throws(() => chain.append([4, bad]), code("invalid-token"));
  }
  assert.equal(chain.numTokens, 3);
  assert.equal(chain.append([4]).length, 1);
});

test("events publish the low 64 bits, signed, or the bytes", () => {
  const chain = new BlockHasher(settings).chain([1, 2, 3, 4]);
  const [low] = chain.external();
  assert.equal(low, 0x1e0b2e028ef071cbn);
  assert.deepEqual(chain.external("bytes"), chain.blockHashes);
  const digest = new Uint8Array(32).fill(0xff);
  assert.equal(externalHash(digest, "int64"), -1n);
  assert.equal(hashKey(-1n), hashKey(digest));
  assert.throws(() => externalHash(5n, "bytes"), code("invalid-hash"));
});

test("coarser views take the last hash of each block", () => {
  assert.deepEqual(coarserHashes(["a", "b", "c", "d", "e"], 2), ["b", "d"]);
  const chain = new BlockHasher(settings).chain(Array.from({ length: 17 }, (_, i) => i));
  assert.deepEqual(chain.view(8), [chain.blockHashes[1], chain.blockHashes[3]]);
  assert.throws(() => chain.view(6), code("invalid-block-size"));
});

test("groups resolve to gcd and lcm, scaled by context parallelism", () => {
  const sizes = resolveBlockSizes([16, 24], { decodeContextParallelSize: 2, unscaledGroups: [1] });
  assert.deepEqual(sizes, { groups: [32, 24], hashBlockSize: 8, schedulerBlockSize: 96 });
  assert.throws(() => resolveBlockSizes([]), code("invalid-block-size"));
  assert.throws(() => resolveBlockSizes([16], { hashBlockSize: 8 }), code("invalid-block-size"));
});

test("a group id stands behind the digest, big-endian", () => {
  const key = makeBlockHashWithGroupId(new Uint8Array([1, 2]), 258);
  assert.deepEqual([...key], [1, 2, 0, 0, 1, 2]);
  assert.deepEqual([...getBlockHash(key)], [1, 2]);
  assert.equal(getGroupId(key), 258);
});

test("an unreproducible root and unknown names are refused by code", () => {
  const { hashSeed: _, ...unset } = settings;
  assert.throws(() => new BlockHasher({ ...unset, algorithm: "xxhash" }), code("unknown-root"));
  assert.throws(() => new BlockHasher({ ...unset, vllm: "0.28.0" }), code("unknown-root"));
  assert.ok(new BlockHasher(unset));
  assert.throws(() => new BlockHasher({ ...settings, algorithm: "builtin" }), code("algorithm-not-reproducible"));
  assert.throws(() => new BlockHasher({ ...settings, vllm: "0.9.1" }), code("unknown-release"));
  assert.ok(Contract.forVllm("99.0").newerThanKnown);
});

test("one bad event does not lose its batch", () => {
  // [1.0, [["Cleared?"], 5, ["AllBlocksCleared"]]]
  const name = (text: string): number[] => [0xa0 | text.length, ...new TextEncoder().encode(text)];
  const payload = Uint8Array.from([
    0x92, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x93, 0x91, ...name("Other"), 5, 0x91, ...name("AllBlocksCleared"),
  ]);
  const batch = decodeBatch(payload);
  assert.deepEqual(
    batch.events.map((event) => event.type),
    ["UnknownEvent", "UndecodableEvent", "AllBlocksCleared"],
  );
  assert.throws(() => decodeBatch(payload.subarray(0, 20)), code("invalid-msgpack"));
  assert.throws(() => decodeBatch(new Uint8Array()), code("invalid-batch"));
});
