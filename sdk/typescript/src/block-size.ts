/** How many tokens a hash covers when there are several KV cache groups, or context parallelism. */

import { checkBlockSize } from "./checks.js";
import { KvHashError } from "./errors.js";

/** The granularities of an engine, in tokens. */
export interface BlockSizes {
  /** Tokens per block of each KV cache group, context parallelism included. */
  readonly groups: readonly number[];
  /** Tokens per hash. */
  readonly hashBlockSize: number;
  /** What cache hits are aligned to. */
  readonly schedulerBlockSize: number;
}

export interface BlockSizeOptions {
  /** Overrides the gcd; must divide every group's size. */
  readonly hashBlockSize?: number;
  readonly decodeContextParallelSize?: number;
  /** Indices of groups that context parallelism leaves alone (Mamba). */
  readonly unscaledGroups?: readonly number[];
}

/** Returns the granularities of an engine with these KV cache groups; throws `invalid-block-size`. */
export function resolveBlockSizes(groupBlockSizes: readonly number[], options: BlockSizeOptions = {}): BlockSizes {
  if (groupBlockSizes.length === 0) {
    throw new KvHashError("invalid-block-size", "expected at least one KV cache group", "$.groups");
  }
  const dcp = checkBlockSize(
    options.decodeContextParallelSize ?? 1,
    "$.decode_context_parallel_size",
    "the decode context parallel size",
  );
  const unscaled = options.unscaledGroups ?? [];
  const groups = groupBlockSizes.map(
    (size, i) => checkBlockSize(size, `$.groups[${i}]`) * (unscaled.includes(i) ? 1 : dcp),
  );
  let unit = groups.reduce(gcd);
  const at = "$.hash_block_size";
  if (options.hashBlockSize !== undefined) {
    const asked = checkBlockSize(options.hashBlockSize, at, "the hash block size");
    groups.forEach((size, i) => {
      if (size % asked) {
        throw new KvHashError(
          "invalid-block-size",
          `the hash block size ${asked} does not divide the ${size} tokens of group ${i}`,
          at,
        );
      }
    });
    if (groups.length === 1 && asked !== groups[0]) {
      throw new KvHashError(
        "invalid-block-size",
        `with a single KV cache group hashes cover its block, ${groups[0]} tokens; got ${asked}`,
        at,
      );
    }
    unit = asked;
  }
  return { groups, hashBlockSize: unit, schedulerBlockSize: groups.reduce((a, b) => (a / gcd(a, b)) * b) };
}

function gcd(a: number, b: number): number {
  return b === 0 ? a : gcd(b, a % b);
}

/**
 * Returns block hashes at a coarser block size, without hashing again: the hash of a block of `factor` fine blocks is
 * that of its last one. A tail that fills no coarse block is left out.
 */
export function coarserHashes<T>(hashes: readonly T[], factor: number): T[] {
  if (!Number.isSafeInteger(factor) || factor < 1) {
    throw new KvHashError("invalid-block-size", `expected a factor of at least 1, got ${factor}`);
  }
  return Array.from({ length: Math.floor(hashes.length / factor) }, (_, i) => hashes[(i + 1) * factor - 1]!);
}
