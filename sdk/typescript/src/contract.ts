/**
 * What each vLLM release hashes and publishes, read from the table that the Python SDK's `contract.py` defines.
 *
 * No other module knows a release number.
 */

import { CONTRACT_TABLE } from "./contract-table.js";
import { KvHashError } from "./errors.js";

/** One value of vLLM's `--prefix-caching-hash-algo`. */
export interface Algorithm {
  readonly name: string;
  readonly serialization: "pickle5" | "cbor";
  readonly digest: "sha256" | "xxh3_128";
  /** Whether the whole digest is chained, or its low 64 bits. */
  readonly keeps: "digest" | "low64";
  /** SHA-256 is; XXH3 is not, and then vLLM never uses a fixed NONE_HASH. */
  readonly collisionResistant: boolean;
}

export interface EventField {
  readonly name: string;
  /** Whether a map leaves the field out when it is null. */
  readonly optional: boolean;
}

/** How one release writes its events. */
export interface EventContract {
  readonly layout: "array" | "map";
  readonly blockStored: readonly EventField[];
  readonly blockRemoved: readonly EventField[];
  readonly hashBytes: boolean;
  readonly replayTopicFrame: boolean;
}

interface Row {
  readonly since: string;
  readonly algorithms: readonly string[];
  readonly chain_values: "int" | "bytes";
  readonly default_seed: string | null;
  readonly lora_key: "id" | "name" | "name_and_path";
  readonly multimodal_key: "identifier" | "identifier_and_offset";
  readonly prompt_embeds_key: "absent" | "bytes" | "sha256";
  readonly tagged_keys: boolean;
  readonly lookahead: boolean;
  readonly events: {
    readonly layout: "array" | "map";
    readonly block_stored: readonly EventField[];
    readonly block_removed: readonly EventField[];
    readonly hash_bytes: boolean;
    readonly replay_topic_frame: boolean;
  };
}

const ROWS: readonly Row[] = CONTRACT_TABLE.rows;
const ALGORITHMS: ReadonlyMap<string, Algorithm> = new Map(
  CONTRACT_TABLE.algorithms.map((row) => [
    row.name,
    {
      name: row.name,
      serialization: row.serialization,
      digest: row.digest,
      keeps: row.keeps,
      collisionResistant: row.collision_resistant,
    },
  ]),
);

/** A vLLM release. A fourth number, pre-release and local parts do not change the contract. */
export class Release {
  constructor(
    readonly major: number,
    readonly minor: number,
    readonly patch: number = 0,
  ) {}

  /** Reads `0.31.0`, `v0.31`, `0.10.1.1`, `0.31.0rc2.dev7+g1234`; throws `unknown-release`. */
  static parse(text: string): Release {
    const match = typeof text === "string" && text.length <= 100 ? RELEASE.exec(strip(text)) : null;
    if (match === null) {
      throw new KvHashError(
        "unknown-release",
        `${shown(text)} is not a vLLM release; expected one such as ${NEWEST} or 'latest'`,
      );
    }
    return new Release(Number(match[1]), Number(match[2]), Number(match[3] ?? 0));
  }

  /** Negative when this release is older than `other`, positive when it is newer. */
  compare(other: Release): number {
    return this.major - other.major || this.minor - other.minor || this.patch - other.patch;
  }

  toString(): string {
    return `${this.major}.${this.minor}.${this.patch}`;
  }
}

// What Python calls white space: `trim` lacks some control characters, and has the byte order mark.
const SPACE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/;

function strip(text: string): string {
  let start = 0;
  let end = text.length;
  while (start < end && SPACE.test(text[start]!)) start++;
  while (end > start && SPACE.test(text[end - 1]!)) end--;
  return text.slice(start, end);
}

const RELEASE =
  /^v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:\.(\d{1,6}))?(?:[-_.]?(?:alpha|beta|pre|post|dev|rc|a|b)[-_.]?\d{0,9}){0,4}(?:\+[a-z0-9._-]*)?$/i;

const OLDEST = Release.parse(CONTRACT_TABLE.oldest);
const NEWEST = Release.parse(CONTRACT_TABLE.newest);

/** Everything about one vLLM release that decides a block hash, its published form, and its events. Immutable. */
export class Contract {
  readonly algorithms: readonly string[];
  readonly chainValues: "int" | "bytes";
  /** The seed of NONE_HASH without PYTHONHASHSEED, for collision-resistant algorithms; null where it is random. */
  readonly defaultSeed: string | null;
  readonly loraKey: "id" | "name" | "name_and_path";
  readonly multimodalKey: "identifier" | "identifier_and_offset";
  readonly promptEmbedsKey: "absent" | "bytes" | "sha256";
  /** Whether extra keys carry a tag in the hash (events stay untagged). */
  readonly taggedKeys: boolean;
  readonly lookahead: boolean;
  readonly events: EventContract;

  private constructor(
    readonly release: Release,
    /** Whether the release is newer than the newest known one, whose contract is then used. */
    readonly newerThanKnown: boolean,
    row: Row,
  ) {
    this.algorithms = row.algorithms;
    this.chainValues = row.chain_values;
    this.defaultSeed = row.default_seed;
    this.loraKey = row.lora_key;
    this.multimodalKey = row.multimodal_key;
    this.promptEmbedsKey = row.prompt_embeds_key;
    this.taggedKeys = row.tagged_keys;
    this.lookahead = row.lookahead;
    this.events = {
      layout: row.events.layout,
      blockStored: row.events.block_stored,
      blockRemoved: row.events.block_removed,
      hashBytes: row.events.hash_bytes,
      replayTopicFrame: row.events.replay_topic_frame,
    };
  }

  /**
   * Returns the contract of a vLLM release, or of the newest known one for `"latest"`.
   *
   * A newer release works as the newest known one and says so in `newerThanKnown`. Throws `unknown-release` for what
   * is no version, or older than the oldest that can be reproduced.
   */
  static forVllm(release: string | Release = "latest"): Contract {
    const latest = typeof release === "string" && strip(release).toLowerCase() === "latest";
    const asked = latest ? NEWEST : release instanceof Release ? release : Release.parse(release);
    if (asked.compare(OLDEST) < 0) {
      throw new KvHashError(
        "unknown-release",
        `vLLM ${asked} is older than ${OLDEST}, the first release whose block hashes can be reproduced; ` +
          `expected ${OLDEST} to ${NEWEST}`,
      );
    }
    const newer = asked.major > NEWEST.major || (asked.major === NEWEST.major && asked.minor > NEWEST.minor);
    const rows = ROWS.filter((row) => Release.parse(row.since).compare(asked) <= 0);
    return new Contract(asked, newer, rows[rows.length - 1]!);
  }

  /** Returns the algorithm of that name; throws `unknown-algorithm`, `algorithm-not-in-release` or `algorithm-not-reproducible`. */
  algorithm(name: string): Algorithm {
    const at = "$.algorithm";
    const expected = this.algorithms.join(", ");
    if (typeof name !== "string") {
      throw new KvHashError("unknown-algorithm", `the algorithm must be text, got ${kindOf(name)}`, at);
    }
    if (name === "builtin") {
      throw new KvHashError(
        "algorithm-not-reproducible",
        "algorithm 'builtin' is Python's own hash(), which differs by process and by build, so its block hashes " +
          `cannot be reproduced; start vLLM with one of: ${expected}`,
        at,
      );
    }
    const algorithm = ALGORITHMS.get(name);
    if (algorithm === undefined) {
      throw new KvHashError(
        "unknown-algorithm",
        `unknown algorithm ${shown(name)}; vLLM ${this.release} has: ${expected}`,
        at,
      );
    }
    if (!this.algorithms.includes(name)) {
      throw new KvHashError(
        "algorithm-not-in-release",
        `vLLM ${this.release} has no algorithm ${shown(name)}; it has: ${expected}`,
        at,
      );
    }
    return algorithm;
  }
}

/** Returns a text as messages show it, shortened. */
export function shown(value: unknown): string {
  const text = typeof value === "string" ? JSON.stringify(value) : String(value);
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}

/** Returns what kind of value was given, for messages. */
export function kindOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  if (value instanceof Uint8Array) return "bytes";
  if (value instanceof Map) return "an object";
  return { string: "text", number: "a number", bigint: "an integer", boolean: "a boolean", object: "an object" }[
    typeof value as string
  ] ?? typeof value;
}
