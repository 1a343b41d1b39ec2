/**
 * Block hashes: `H(serialize((parent, tokens, extra_keys)))`, chained from NONE_HASH.
 *
 * Only a full block has a hash. With look-ahead L (drafters) the key slot becomes `(extra_keys, tok_1 .. tok_L)` with
 * the L tokens after the block, the extra keys are those of the block and of these tokens, and the block is hashed
 * once they exist.
 */

import { externalHash, type BlockHash, type ExternalForm } from "./block-hash.js";
import { coarserHashes } from "./block-size.js";
import { encodeCbor } from "./cbor.js";
import { checkBlockSize, checkInt, checkText, normalizeTokens } from "./checks.js";
import { Contract, kindOf, type Algorithm } from "./contract.js";
import { sha256, xxh3_128 } from "./digest.js";
import { KvHashError } from "./errors.js";
import { RequestKeys, eventExtraKeys, type ExtraKeys, type RequestOptions } from "./extra-keys.js";
import { encodePickle5 } from "./pickle5.js";
import { bigEndian, type Int, type TokenIds, type Value } from "./values.js";

/** The settings of an engine that decide its block hashes. */
export interface HasherOptions {
  /** A release such as `"0.33.0"`, `"latest"` (the default), or a `Contract`. */
  readonly vllm?: string | Contract;
  /** vLLM's `--prefix-caching-hash-algo`; default `sha256`. */
  readonly algorithm?: string;
  /** Tokens per block; default 16. */
  readonly blockSize?: number;
  /** PYTHONHASHSEED in the engine's environment, as the text that it is; null or left out where it is unset. */
  readonly hashSeed?: string | null;
  /** Tokens after a block that its hash covers; default 0. */
  readonly lookahead?: number;
  /** A hash covers `blockSize` times this many tokens; default 1. */
  readonly decodeContextParallelSize?: number;
}

/** One algorithm of one release: a preimage in, a chain value out. */
export class HashFunction {
  readonly #digest: (data: Uint8Array) => Uint8Array;

  constructor(
    readonly algorithm: Algorithm,
    readonly contract: Contract,
  ) {
    this.#digest = algorithm.digest === "sha256" ? sha256 : xxh3_128;
  }

  /** Returns the bytes that are hashed for a preimage. */
  serialize(preimage: Value): Uint8Array {
    return this.algorithm.serialization === "cbor" ? encodeCbor(preimage) : encodePickle5(preimage);
  }

  /** Returns the chain value of a preimage. */
  hash(preimage: Value): BlockHash {
    const digest = this.#digest(this.serialize(preimage));
    if (this.contract.chainValues === "bytes") return digest;
    return bigEndian(this.algorithm.keeps === "low64" ? digest.subarray(-8) : digest);
  }
}

/**
 * Returns NONE_HASH, the parent of block 0: the hash of the seed as a text string. The empty text is a seed.
 *
 * Throws `unknown-root` where vLLM draws it at random, `invalid-seed` where the seed is not text.
 */
export function noneHash(hashFunction: HashFunction, hashSeed: string | null): BlockHash {
  const { algorithm, contract } = hashFunction;
  const at = "$.hash_seed";
  if (hashSeed !== null) {
    if (typeof hashSeed !== "string") {
      throw new KvHashError(
        "invalid-seed",
        `expected the hash seed as text, got ${kindOf(hashSeed)}; vLLM hashes PYTHONHASHSEED as the text that it is`,
        at,
      );
    }
    checkText(hashSeed, at, "the hash seed", "invalid-seed");
  }
  const seed = hashSeed ?? (algorithm.collisionResistant ? contract.defaultSeed : null);
  if (seed === null) {
    throw new KvHashError(
      "unknown-root",
      `vLLM ${contract.release} draws NONE_HASH at random for ${algorithm.name} when PYTHONHASHSEED is not set, so ` +
        "its block hashes cannot be reproduced; set PYTHONHASHSEED in the engine's environment and give the same " +
        "value as the hash seed",
      at,
    );
  }
  return hashFunction.hash(seed);
}

/**
 * Computes the block hashes of one engine's settings. Immutable.
 *
 * ```ts
 * const hasher = new BlockHasher({ vllm: "0.33.0", algorithm: "sha256_cbor", blockSize: 4, hashSeed: "0" });
 * hasher.hashTokens([1, 2, 3, 4]).map((hash) => externalHash(hash));
 * ```
 */
export class BlockHasher {
  readonly contract: Contract;
  readonly hashFunction: HashFunction;
  readonly blockSize: number;
  readonly decodeContextParallelSize: number;
  readonly lookahead: number;
  readonly noneHash: BlockHash;

  /**
   * Throws `unknown-release`, `unknown-algorithm`, `algorithm-not-in-release`, `algorithm-not-reproducible`,
   * `invalid-block-size`, `invalid-request`, `feature-not-in-release`, `invalid-seed` or `unknown-root`.
   */
  constructor(options: HasherOptions = {}) {
    const vllm = options.vllm ?? "latest";
    this.contract = vllm instanceof Contract ? vllm : Contract.forVllm(vllm);
    const algorithm = this.contract.algorithm(options.algorithm === undefined ? "sha256" : options.algorithm);
    this.blockSize = checkBlockSize(options.blockSize ?? 16);
    this.decodeContextParallelSize = checkBlockSize(
      options.decodeContextParallelSize ?? 1,
      "$.decode_context_parallel_size",
      "the decode context parallel size",
    );
    this.lookahead = Number(
      checkInt(options.lookahead ?? 0, "$.lookahead", "the look-ahead", "invalid-request", 0, 1n << 16n),
    );
    if (this.lookahead > 0 && !this.contract.lookahead) {
      throw new KvHashError(
        "feature-not-in-release",
        `vLLM ${this.contract.release} has no look-ahead hashing; expected a look-ahead of 0`,
        "$.lookahead",
      );
    }
    this.hashFunction = new HashFunction(algorithm, this.contract);
    this.noneHash = noneHash(this.hashFunction, options.hashSeed ?? null);
  }

  /** Tokens that one hash covers: the block size times the decode context parallel size. */
  get span(): number {
    return this.blockSize * this.decodeContextParallelSize;
  }

  /** Returns the hash of every full block of a whole prompt; throws as `chain` does. */
  hashTokens(tokens: TokenIds, options: RequestOptions = {}): BlockHash[] {
    return this.chain(tokens, options).blockHashes;
  }

  /**
   * Starts the chain of one request; more tokens follow with `Chain.append`.
   *
   * `tokens` is the whole prompt: multimodal items must lie within it and prompt embeddings must have a row for each.
   * With null the prompt comes by `append`, and neither can be checked here. Throws `invalid-token`, `invalid-lora`,
   * `invalid-salt`, `invalid-multimodal` or `invalid-prompt-embeds`.
   */
  chain(tokens: TokenIds | null = null, options: RequestOptions = {}): Chain {
    const ids = tokens === null ? null : normalizeTokens(tokens);
    return new Chain(this, new RequestKeys(options, ids === null ? null : ids.length), ids ?? []);
  }
}

/** The growing chain of one request. Made by `BlockHasher.chain`; tokens of hashed blocks are not kept. */
export class Chain {
  readonly #keys: RequestKeys;
  readonly #alwaysKeyed: boolean;
  readonly #hashes: BlockHash[] = [];
  readonly #extraKeys: ExtraKeys[] = [];
  #pending: Int[] = [];
  #firstItem = 0;

  /** Use `BlockHasher.chain`. */
  constructor(
    readonly hasher: BlockHasher,
    keys: RequestKeys,
    tokens: Int[],
  ) {
    this.#keys = keys;
    keys.loraKeys(hasher.contract); // a missing name, path or id is said before the first block
    this.#alwaysKeyed = hasher.lookahead > 0 || !keys.empty;
    this.#grow(tokens);
  }

  /** How many tokens the chain has, hashed or not. */
  get numTokens(): number {
    return this.#hashes.length * this.hasher.span + this.#pending.length;
  }

  /** The parent of block 0. */
  get noneHash(): BlockHash {
    return this.hasher.noneHash;
  }

  /** The hashes so far, one a full block; a copy. */
  get blockHashes(): BlockHash[] {
    return [...this.#hashes];
  }

  /** Adds token ids and returns the hashes that these completed; throws `invalid-token` and then changes nothing. */
  append(tokens: TokenIds): BlockHash[] {
    return this.#grow(normalizeTokens(tokens, "$"));
  }

  /** Returns the extra keys of every hashed block, as hashed (with the look-ahead tokens where there are any). */
  extraKeys(): ExtraKeys[] {
    return [...this.#extraKeys];
  }

  /** Returns the extra keys of every hashed block as events publish them: untagged, without look-ahead tokens. */
  eventExtraKeys(): ExtraKeys[] {
    const { contract, lookahead } = this.hasher;
    return this.#extraKeys.map((keys) =>
      eventExtraKeys(lookahead > 0 && keys !== null ? (keys[0] as ExtraKeys) : keys, contract),
    );
  }

  /** Returns the hashes as events carry them. */
  external(form?: "uint64" | "int64"): bigint[];
  external(form: ExternalForm): (bigint | Uint8Array)[];
  external(form: ExternalForm = "uint64"): (bigint | Uint8Array)[] {
    return this.#hashes.map((hash) => externalHash(hash, form));
  }

  /** Returns the hashes at a coarser block size, a multiple of the hasher's span; throws `invalid-block-size`. */
  view(blockSize: number): BlockHash[] {
    const size = checkBlockSize(blockSize);
    if (size % this.hasher.span) {
      throw new KvHashError(
        "invalid-block-size",
        `a view needs a multiple of the ${this.hasher.span} tokens of a hash, got ${size}`,
        "$.block_size",
      );
    }
    return coarserHashes(this.#hashes, size / this.hasher.span);
  }

  #grow(tokens: Int[]): BlockHash[] {
    const { span, lookahead, hashFunction, contract } = this.hasher;
    const waiting = this.#pending.length ? this.#pending.concat(tokens) : tokens;
    const first = this.#hashes.length;
    let position = 0;
    while (position + span + lookahead <= waiting.length) {
      const block = waiting.slice(position, position + span);
      position += span;
      let keys: ExtraKeys = null;
      if (this.#alwaysKeyed) {
        const start = this.#hashes.length * span;
        this.#firstItem = this.#keys.firstItem(start, this.#firstItem);
        keys = this.#keys.block(contract, start, start + span + lookahead, this.#firstItem);
        if (lookahead > 0) keys = [keys, ...waiting.slice(position, position + lookahead)];
      }
      const parent = this.#hashes.at(-1) ?? this.hasher.noneHash;
      this.#hashes.push(hashFunction.hash([parent, block, keys]));
      this.#extraKeys.push(keys);
    }
    this.#pending = waiting.slice(position);
    return this.#hashes.slice(first);
  }
}
