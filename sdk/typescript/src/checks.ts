/** The one place where tokens, text and integers from outside are checked and normalised. */

import { kindOf, shown } from "./contract.js";
import { KvHashError, type ErrorCode } from "./errors.js";
import { JsonFloat } from "./json.js";
import { compact, type Int, type TokenIds } from "./values.js";

const MAX_TOKEN = (1n << 64n) - 1n;
const MAX_INT64 = (1n << 63n) - 1n;

/**
 * Returns token ids as an array of integers, each a `number` where that is exact.
 *
 * An id is an integer from 0 to 2^64 - 1: a `bigint`, or a `number` that is a safe integer (a larger `number` may
 * already have lost digits, so it is refused). Throws `invalid-token` naming the first bad one.
 */
export function normalizeTokens(tokens: TokenIds, at = "$.tokens"): Int[] {
  const source: unknown = tokens;
  if (source instanceof Uint8Array || source instanceof Uint16Array || source instanceof Uint32Array) {
    return Array.from(source);
  }
  if (source instanceof BigUint64Array) return Array.from(source, compact);
  if (!Array.isArray(source)) {
    throw new KvHashError("invalid-token", `expected a list of token ids, got ${kindOf(source)}`, at);
  }
  const ids = new Array<Int>(source.length);
  for (let i = 0; i < source.length; i++) {
    const value: unknown = source[i];
    if (typeof value === "number" && Number.isSafeInteger(value) && value >= 0) ids[i] = value === 0 ? 0 : value;
    else if (typeof value === "bigint" && value >= 0n && value <= MAX_TOKEN) ids[i] = compact(value);
    else {
      throw new KvHashError(
        "invalid-token",
        `expected a token id, an integer from 0 to 2^64 - 1 (above 2^53 - 1 a bigint), got ${describe(value)}`,
        `${at}[${i}]`,
      );
    }
  }
  return ids;
}

function describe(value: unknown): string {
  if (value instanceof JsonFloat) return value.text.slice(0, 40);
  return typeof value === "object" && value !== null ? kindOf(value) : shown(value);
}

/** Returns `value` if it is text that UTF-8 can carry; throws `code` otherwise. */
export function checkText(value: unknown, at: string, what: string, code: ErrorCode = "invalid-request"): string {
  if (typeof value !== "string") {
    throw new KvHashError(code, `expected ${what} as text, got ${kindOf(value)}`, at);
  }
  if (LONE_SURROGATE.test(value)) {
    throw new KvHashError(code, `${what} holds a lone surrogate, which UTF-8 cannot carry`, at);
  }
  return value;
}

const LONE_SURROGATE = /\p{Surrogate}/u;

/** Returns `value` if it is an integer from `minimum` to `maximum`; throws `code` otherwise. */
export function checkInt(
  value: unknown,
  at: string,
  what: string,
  code: ErrorCode,
  minimum: number,
  maximum: bigint = MAX_INT64,
): bigint {
  const whole =
    typeof value === "bigint" ? value : typeof value === "number" && Number.isSafeInteger(value) ? BigInt(value) : null;
  if (whole === null) {
    throw new KvHashError(code, `expected ${what} as an integer, got ${describe(value)}`, at);
  }
  if (whole < BigInt(minimum) || whole > maximum) {
    const below = whole < BigInt(minimum) ? `of at least ${minimum}` : "of at most 2^63 - 1";
    const limit = maximum < MAX_INT64 ? `from ${minimum} to ${maximum}` : below;
    throw new KvHashError(code, `expected ${what}, an integer ${limit}, got ${shown(whole)}`, at);
  }
  return whole;
}

/** Returns a block size (or context-parallel size), 1 to 2^31 - 1; throws `invalid-block-size`. */
export function checkBlockSize(value: unknown, at = "$.block_size", what = "the block size"): number {
  return Number(checkInt(value, at, what, "invalid-block-size", 1, (1n << 31n) - 1n));
}
