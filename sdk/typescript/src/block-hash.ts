/**
 * The forms a block hash takes: in the chain, with a group id, and published in events.
 *
 * In the chain it is the digest from vLLM 0.10.2 on, an integer before. Published it is the low 64 bits of the
 * big-endian digest as an unsigned integer, or the raw bytes.
 */

import { KvHashError } from "./errors.js";
import { bigEndian, toHex } from "./values.js";

/** What is chained: a digest (32 bytes for sha256*, 16 for xxhash*), or (before 0.10.2) an integer. */
export type BlockHash = Uint8Array | bigint;
export type ExternalForm = "uint64" | "int64" | "bytes";

/** Returns the low 64 bits, unsigned: of an integer, or of a digest read big-endian (its last 8 bytes). */
export function low64(value: BlockHash): bigint {
  return BigInt.asUintN(64, typeof value === "bigint" ? value : bigEndian(value.subarray(-8)));
}

/**
 * Returns a block hash as events carry it.
 *
 * For an integer (before 0.10.2) `"uint64"` returns it unchanged, since vLLM published it so; `"bytes"` does not exist
 * there and throws `invalid-hash`.
 */
export function externalHash(value: BlockHash, form?: "uint64" | "int64"): bigint;
export function externalHash(value: BlockHash, form: ExternalForm): bigint | Uint8Array;
export function externalHash(value: BlockHash, form: ExternalForm = "uint64"): bigint | Uint8Array {
  if (form === "bytes") {
    if (typeof value === "bigint") {
      throw new KvHashError("invalid-hash", "before vLLM 0.10.2 hashes are integers; they have no bytes form");
    }
    return value;
  }
  if (form === "int64") return BigInt.asIntN(64, low64(value));
  return typeof value === "bigint" ? value : low64(value);
}

/** Returns the key of vLLM's hash map: the digest and the KV cache group's id, 4 bytes big-endian. */
export function makeBlockHashWithGroupId(blockHash: Uint8Array, groupId: number): Uint8Array {
  if (!Number.isInteger(groupId) || groupId < 0 || groupId >= 2 ** 32) {
    throw new KvHashError("invalid-hash", `a group id is 0 to 2^32 - 1, got ${groupId}`);
  }
  const key = new Uint8Array(blockHash.length + 4);
  key.set(blockHash);
  new DataView(key.buffer).setUint32(blockHash.length, groupId);
  return key;
}

/** Returns the digest part of such a key. */
export function getBlockHash(key: Uint8Array): Uint8Array {
  return key.slice(0, -4);
}

/** Returns the group id part of such a key. */
export function getGroupId(key: Uint8Array): number {
  return Number(bigEndian(key.subarray(-4)));
}

/** Returns a chain value as request lines carry it: lower-case hex, or `{"int": decimal}` before 0.10.2. */
export function jsonHash(value: BlockHash): string | { readonly int: string } {
  return typeof value === "bigint" ? { int: value.toString() } : toHex(value);
}
