/**
 * Request lines: one JSON object a line in, one a line out; the text format that all kvhash programs share.
 *
 * One bad line gives one error line. An unknown field is refused: a misspelt `cache_salt` must not become a wrong hash.
 */

import { jsonHash } from "./block-hash.js";
import { checkText, normalizeTokens } from "./checks.js";
import { kindOf } from "./contract.js";
import { KvHashError, DecodeError, type ErrorCode } from "./errors.js";
import { RequestKeys, jsonKeys, type Lora, type MultimodalItem, type PromptEmbeds, type RequestOptions } from "./extra-keys.js";
import { BlockHasher, type Chain, type HasherOptions } from "./hasher.js";
import { parseJsonBytes, writeJson, type Json, type JsonLike } from "./json.js";
import { fromHex, type Int } from "./values.js";

/** The longest request line, in bytes, its end not counted; some 10^6 tokens. */
export const MAX_LINE_BYTES = 8 * 1024 * 1024;

const FIELDS = [
  "tokens",
  "vllm",
  "algorithm",
  "hash_seed",
  "block_size",
  "lookahead",
  "decode_context_parallel_size",
  "lora",
  "cache_salt",
  "multimodal",
  "prompt_embeds",
];

/** Everything that decides the block hashes of one prompt. */
export interface HashRequest {
  readonly settings: HasherOptions;
  readonly tokens: readonly Int[];
  readonly options: RequestOptions;
}

/** Checks the object of a request line, without looking at `id`; throws `KvHashError`s. */
export function parseRequest(value: Json): HashRequest {
  if (!(value instanceof Map)) {
    throw new KvHashError("invalid-request", `expected a JSON object, got ${kindOf(value)}`, "$");
  }
  const line = new Map(value);
  line.delete("id");
  checkFields(line, "$", FIELDS, "invalid-request");
  if (!line.has("tokens")) {
    throw new KvHashError("invalid-request", "a request needs 'tokens', a list of token ids", "$.tokens");
  }
  const tokens = normalizeTokens(line.get("tokens") as Int[]);
  // The checks of `RequestKeys` take any value, so what JSON gave is handed on as it is, one part after the other:
  // a line with several faults is answered with the first one, in the same order by every kvhash program.
  let options: RequestOptions = {};
  const add = (more: RequestOptions): void => {
    new RequestKeys(more, tokens.length);
    options = { ...options, ...more };
  };
  add({ cacheSalt: line.get("cache_salt") as string | null });
  add({ promptEmbeds: embedsOf(line.get("prompt_embeds") ?? null) });
  add({ lora: loraOf(line.get("lora") ?? null) });
  add({ multimodal: itemsOf(line.get("multimodal") ?? null) });
  if (line.has("vllm")) checkText(line.get("vllm"), "$.vllm", "the vLLM release");
  const settings = {
    vllm: line.get("vllm"),
    algorithm: line.get("algorithm"),
    hashSeed: line.get("hash_seed") ?? null,
    blockSize: line.get("block_size"),
    lookahead: line.get("lookahead"),
    decodeContextParallelSize: line.get("decode_context_parallel_size"),
  } as HasherOptions;
  return { settings, tokens, options };
}

function checkFields(value: Json, at: string, allowed: readonly string[], code: ErrorCode): Map<string, Json> {
  if (!(value instanceof Map)) throw new KvHashError(code, `expected an object, got ${kindOf(value)}`, at);
  for (const name of value.keys()) {
    if (!allowed.includes(name)) {
      throw new KvHashError(
        code,
        `unknown field ${JSON.stringify(name)}; expected one of: ${allowed.join(", ")}`,
        at,
      );
    }
  }
  return value;
}

function needFields(value: Map<string, Json>, at: string, names: readonly string[], what: string, code: ErrorCode): void {
  for (const name of names) {
    if (!value.has(name)) throw new KvHashError(code, `${what} need '${name}'`, at);
  }
}

function loraOf(value: Json): Lora | null {
  if (value === null) return null;
  return Object.fromEntries(checkFields(value, "$.lora", ["name", "path", "id"], "invalid-lora")) as Lora;
}

function itemsOf(value: Json): MultimodalItem[] | null {
  if (!Array.isArray(value)) return value as null; // null, or refused by the check
  const names = ["identifier", "offset", "length"];
  return value.map((item, i) => {
    const fields = checkFields(item, `$.multimodal[${i}]`, names, "invalid-multimodal");
    needFields(fields, `$.multimodal[${i}]`, names, "multimodal items", "invalid-multimodal");
    return Object.fromEntries(fields) as unknown as MultimodalItem;
  });
}

function embedsOf(value: Json): PromptEmbeds | null {
  if (value === null) return null;
  const at = "$.prompt_embeds";
  const names = ["shape", "dtype", "data"];
  const fields = checkFields(value, at, names, "invalid-prompt-embeds");
  needFields(fields, at, names, "prompt embeddings", "invalid-prompt-embeds");
  const data = fields.get("data");
  return {
    shape: fields.get("shape"),
    dtype: fields.get("dtype"),
    data: typeof data === "string" ? embedsData(data, `${at}.data`) : data,
  } as unknown as PromptEmbeds;
}

function embedsData(text: string, at: string): Uint8Array {
  const bytes = fromHex(text);
  if (bytes === null) throw new KvHashError("invalid-prompt-embeds", "the data is not hex", at);
  return bytes;
}

/** Hashes a request and returns the answer line's object, without `id`. */
export function answer(request: HashRequest): { readonly [name: string]: JsonLike } {
  const chain: Chain = new BlockHasher(request.settings).chain(request.tokens, request.options);
  return {
    none_hash: jsonHash(chain.noneHash),
    block_hashes: chain.blockHashes.map(jsonHash),
    external: chain.external().map(String),
    extra_keys: chain.extraKeys().map(jsonKeys),
  };
}

/** Answers one line; null for a blank one. `handlers` answer lines that have a field of that name instead. */
export function answerLine(
  line: Uint8Array,
  handlers: ReadonlyMap<string, (line: Map<string, Json>) => { readonly [name: string]: JsonLike }> = new Map(),
): string | null {
  const tooLong = lengthWithoutEnd(line) > MAX_LINE_BYTES;
  if (!tooLong && isBlank(line)) return null;
  let id: Json = null;
  try {
    if (tooLong) {
      throw new DecodeError("line-too-long", `the line has more than the ${MAX_LINE_BYTES} bytes that are read`);
    }
    const value = parseJsonBytes(line);
    if (value instanceof Map) {
      id = value.get("id") ?? null;
      for (const [field, handle] of handlers) {
        if (value.has(field)) return writeJson({ id, ...handle(value) });
      }
    }
    return writeJson({ id, ...answer(parseRequest(value)) });
  } catch (error) {
    if (!(error instanceof KvHashError)) throw error;
    return writeJson({ id, error: { code: error.code, message: error.message } });
  }
}

function lengthWithoutEnd(line: Uint8Array): number {
  if (line.at(-1) !== 0x0a) return line.length;
  return line.length - (line.at(-2) === 0x0d ? 2 : 1);
}

function isBlank(line: Uint8Array): boolean {
  return line.every((byte) => byte === 0x20 || (byte >= 0x09 && byte <= 0x0d));
}
