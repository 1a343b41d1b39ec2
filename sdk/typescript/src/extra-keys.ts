/**
 * What besides the tokens goes into a block's hash: LoRA adapter, multimodal items, cache salt, prompt embeddings.
 *
 * Order within a block, in every release: LoRA, multimodal items by offset, salt (block 0 only), prompt embeddings. A
 * block with none of them has the key null. What each looks like in a release is data of its `Contract`.
 */

import { checkInt, checkText } from "./checks.js";
import { kindOf, shown, type Contract } from "./contract.js";
import { sha256 } from "./digest.js";
import { KvHashError } from "./errors.js";
import type { JsonLike } from "./json.js";
import { Ref, compact, toHex, type Int, type Value } from "./values.js";

/** The extra keys of one block as hashed. */
export type ExtraKeys = null | readonly Value[];

// The tags. Each is one constant object in vLLM's code, so a second use in a block is a back-reference in pickle.
const LORA = new Ref("lora");
const MM = new Ref("mm");
const CACHE_SALT = new Ref("cache_salt");
const PROMPT_EMBEDS = new Ref("prompt_embeds");

const DTYPE_SIZES: ReadonlyMap<string, number> = new Map([
  ["float32", 4],
  ["float16", 2],
  ["bfloat16", 2],
]);

/** A LoRA adapter as registered with the engine; which of the fields is hashed depends on the release. */
export interface Lora {
  readonly name?: string | null;
  /** The path exactly as the engine got it. */
  readonly path?: string | null;
  /** The adapter's integer id, at least 1. */
  readonly id?: Int | null;
}

/** An image, audio or video: its content identifier and the placeholder tokens that it fills. */
export interface MultimodalItem {
  readonly identifier: string;
  /** Tokens from the start of the prompt. */
  readonly offset: number;
  readonly length: number;
}

/** Prompt embeddings: a matrix, one row per prompt token, as row-major little-endian bytes. */
export interface PromptEmbeds {
  /** Rows and hidden size. */
  readonly shape: readonly [number, number];
  readonly dtype: "float32" | "float16" | "bfloat16";
  readonly data: Uint8Array;
}

/** What one request adds to its blocks' keys. */
export interface RequestOptions {
  readonly lora?: Lora | null;
  /** An empty salt is no salt. */
  readonly cacheSalt?: string | null;
  /** Sorted by offset, not overlapping. */
  readonly multimodal?: readonly MultimodalItem[] | null;
  readonly promptEmbeds?: PromptEmbeds | null;
}

/** The checked form of `RequestOptions`. */
export class RequestKeys {
  readonly #lora: Lora | null;
  readonly #salt: string;
  readonly #items: readonly MultimodalItem[];
  readonly #embeds: (PromptEmbeds & { readonly rowSize: number }) | null;

  /**
   * Checks everything once. With `numTokens`, items must end within it and embeddings must have a row for each.
   * Throws `invalid-salt`, `invalid-prompt-embeds`, `invalid-lora` or `invalid-multimodal`.
   */
  constructor(options: RequestOptions, numTokens: number | null) {
    const { lora, cacheSalt, multimodal, promptEmbeds } = options;
    this.#salt = cacheSalt == null ? "" : checkText(cacheSalt, "$.cache_salt", "the cache salt", "invalid-salt");
    this.#embeds = promptEmbeds == null ? null : checkEmbeds(promptEmbeds);
    if (this.#embeds !== null && numTokens !== null && this.#embeds.shape[0] < numTokens) {
      throw new KvHashError(
        "invalid-prompt-embeds",
        `${this.#embeds.shape[0]} rows for ${numTokens} tokens; expected a row per token`,
        "$.prompt_embeds.shape[0]",
      );
    }
    this.#lora = lora == null ? null : checkLora(lora);
    this.#items = multimodal == null ? [] : checkItems(multimodal, numTokens);
  }

  /** Whether no block of this request can have a key. */
  get empty(): boolean {
    return this.#lora === null && this.#salt === "" && this.#items.length === 0 && this.#embeds === null;
  }

  /** Returns the adapter's part of every block's key; throws `invalid-lora` when the release needs what is missing. */
  loraKeys(contract: Contract): readonly Value[] {
    const lora = this.#lora;
    if (lora === null) return [];
    const needed = (what: "name" | "path" | "id"): string | Int => {
      const value = lora[what];
      if (value == null) {
        throw new KvHashError(
          "invalid-lora",
          `vLLM ${contract.release} hashes the adapter's ${what}, and none was given`,
          `$.lora.${what}`,
        );
      }
      return value;
    };
    if (contract.loraKey === "id") return [needed("id")];
    const name = needed("name");
    return contract.loraKey === "name" ? [name] : [[LORA, name, needed("path")]];
  }

  /** Returns the number of the first item, from `from` on, that ends after `start`. */
  firstItem(start: number, from: number): number {
    let i = from;
    while (i < this.#items.length && end(this.#items[i]!) <= start) i++;
    return i;
  }

  /** Returns the extra keys of the tokens `start` to `stop`; the items before `firstItem` end before `start`. */
  block(contract: Contract, start: number, stop: number, firstItem: number): ExtraKeys {
    const keys: Value[] = [...this.loraKeys(contract)];
    for (let i = firstItem; i < this.#items.length; i++) {
      const item = this.#items[i]!;
      if (item.offset >= stop) break;
      if (end(item) > start) keys.push(itemKey(item, start, contract));
    }
    if (this.#salt !== "" && start === 0) keys.push(contract.taggedKeys ? [CACHE_SALT, this.#salt] : this.#salt);
    if (this.#embeds !== null && contract.promptEmbedsKey !== "absent") {
      // Rows that do not exist are left out, as vLLM's slice does.
      const rows = this.#embeds.data.subarray(start * this.#embeds.rowSize, stop * this.#embeds.rowSize);
      const content = contract.promptEmbedsKey === "bytes" ? rows : sha256(rows);
      keys.push(contract.taggedKeys ? [PROMPT_EMBEDS, content] : content);
    }
    return keys.length ? keys : null;
  }
}

function end(item: MultimodalItem): number {
  return item.offset + item.length;
}

function itemKey(item: MultimodalItem, start: number, contract: Contract): Value {
  if (contract.multimodalKey === "identifier") return item.identifier;
  const offset = item.offset - start;
  return contract.taggedKeys ? [MM, item.identifier, offset] : [item.identifier, offset];
}

function checkLora(lora: Lora): Lora {
  for (const name of ["name", "path"] as const) {
    const value = lora[name];
    if (value == null) continue;
    checkText(value, `$.lora.${name}`, `the adapter's ${name}`, "invalid-lora");
    if (value === "") throw new KvHashError("invalid-lora", `the adapter's ${name} is empty`, `$.lora.${name}`);
  }
  if (lora.id == null) return { ...lora };
  return { ...lora, id: compact(checkInt(lora.id, "$.lora.id", "the adapter's id", "invalid-lora", 1)) };
}

function checkItems(items: readonly MultimodalItem[], numTokens: number | null): MultimodalItem[] {
  const code = "invalid-multimodal";
  if (!Array.isArray(items)) {
    throw new KvHashError(code, `expected a list of items, got ${kindOf(items)}`, "$.multimodal");
  }
  const checked: MultimodalItem[] = [];
  items.forEach((given: MultimodalItem, i) => {
    const at = `$.multimodal[${i}]`;
    if (typeof given !== "object" || given === null) {
      throw new KvHashError(code, `expected an object, got ${kindOf(given)}`, at);
    }
    const identifier = checkText(given.identifier, `${at}.identifier`, "the identifier", code);
    const limit = BigInt(Number.MAX_SAFE_INTEGER) / 2n;
    const item = {
      identifier,
      offset: Number(checkInt(given.offset, `${at}.offset`, "the offset", code, 0, limit)),
      length: Number(checkInt(given.length, `${at}.length`, "the length", code, 1, limit)),
    };
    const previous = checked.at(-1);
    if (previous !== undefined && item.offset < previous.offset) {
      throw new KvHashError(
        code,
        `items must be sorted by offset: ${item.offset} comes after ${previous.offset}`,
        `${at}.offset`,
      );
    }
    if (previous !== undefined && item.offset < end(previous)) {
      throw new KvHashError(
        code,
        `items must not overlap: the one before ends at ${end(previous)}, this starts at ${item.offset}`,
        `${at}.offset`,
      );
    }
    if (numTokens !== null && end(item) > numTokens) {
      throw new KvHashError(
        code,
        `the item ends at ${end(item)}, past the ${numTokens} tokens of the prompt`,
        `${at}.length`,
      );
    }
    checked.push(item);
  });
  return checked;
}

function checkEmbeds(given: PromptEmbeds): PromptEmbeds & { readonly rowSize: number } {
  const code = "invalid-prompt-embeds";
  const at = "$.prompt_embeds";
  const shape: unknown = given.shape;
  if (!Array.isArray(shape) || shape.length !== 2) {
    throw new KvHashError(code, `expected [rows, hidden size], got ${kindOf(shape)}`, `${at}.shape`);
  }
  const rows = checkInt(shape[0], `${at}.shape[0]`, "the number of rows", code, 0);
  const hidden = checkInt(shape[1], `${at}.shape[1]`, "the hidden size", code, 1);
  const size = typeof given.dtype === "string" ? DTYPE_SIZES.get(given.dtype) : undefined;
  if (size === undefined) {
    throw new KvHashError(
      code,
      `unknown dtype ${shown(given.dtype)}; expected one of: ${[...DTYPE_SIZES.keys()].join(", ")}`,
      `${at}.dtype`,
    );
  }
  if (!(given.data instanceof Uint8Array)) {
    throw new KvHashError(code, `expected the rows as bytes, got ${kindOf(given.data)}`, `${at}.data`);
  }
  const needed = rows * hidden * BigInt(size);
  if (BigInt(given.data.length) !== needed) {
    throw new KvHashError(
      code,
      `${rows} rows of ${hidden} ${given.dtype} are ${needed} bytes, got ${given.data.length}`,
      `${at}.data`,
    );
  }
  return {
    shape: [Number(rows), Number(hidden)],
    dtype: given.dtype,
    data: given.data.slice(),
    rowSize: Number(hidden) * size,
  };
}

/**
 * Returns the keys of one block as its event publishes them: untagged, whatever the hash holds.
 *
 * A tagged multimodal key becomes `[identifier, offset]`, every other its first value.
 */
export function eventExtraKeys(keys: ExtraKeys, contract: Contract): ExtraKeys {
  if (keys === null || !contract.taggedKeys) return keys;
  return keys.map((key) => {
    const [tag, ...rest] = key as readonly Value[];
    return tag === MM ? rest : rest[0]!;
  });
}

/** Returns extra keys as JSON values: bytes as `{"bytes": hex}`. */
export function jsonKeys(given: Value): JsonLike {
  const value = given instanceof Ref ? given.value : given;
  if (value instanceof Uint8Array) return { bytes: toHex(value) };
  if (typeof value === "object" && value !== null) return (value as readonly Value[]).map(jsonKeys);
  return value;
}
