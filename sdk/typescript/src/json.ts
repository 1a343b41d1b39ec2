/**
 * Strict JSON whose integers stay exact: what `JSON.parse` cannot do, and what request lines need.
 *
 * Integers become a `number` where that is exact, else a `bigint`; numbers with a fraction or exponent become a
 * `JsonFloat` that keeps its text; objects become a `Map`, so that a field named `__proto__` is a field. A field that
 * stands twice in one object is refused, as are NaN, control characters in strings, and nesting past `MAX_DEPTH`.
 */

import { DecodeError } from "./errors.js";
import { compact } from "./values.js";

/** A number that is not written as an integer. */
export class JsonFloat {
  constructor(readonly text: string) {}
}

export type Json = null | boolean | number | bigint | JsonFloat | string | Json[] | Map<string, Json>;

const MAX_DEPTH = 500;
/** As many digits as Python reads of an integer. */
const MAX_DIGITS = 4300;

const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y;
// Everything up to the next quote, backslash or control character.
// eslint-disable-next-line no-control-regex
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const ESCAPES: Readonly<Record<string, string>> = {
  '"': '"',
  "\\": "\\",
  "/": "/",
  b: "\b",
  f: "\f",
  n: "\n",
  r: "\r",
  t: "\t",
};

/** Reads one line's bytes; throws `invalid-utf8` or `invalid-json`. */
export function parseJsonBytes(data: Uint8Array): Json {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    throw new DecodeError("invalid-utf8", "the line is not UTF-8");
  }
  return parseJson(text);
}

/** Reads one JSON text; throws `invalid-json`, saying where. */
export function parseJson(text: string): Json {
  return new Parser(text).document();
}

class Parser {
  #at = 0;
  constructor(readonly text: string) {}

  document(): Json {
    const value = this.#value(0);
    this.#space();
    if (this.#at < this.text.length) this.#fail("extra data");
    return value;
  }

  #value(depth: number): Json {
    this.#space();
    const first = this.text[this.#at];
    if (depth >= MAX_DEPTH && (first === "{" || first === "[")) {
      throw new DecodeError("invalid-json", "the line is nested too deeply");
    }
    switch (first) {
      case "{":
        return this.#object(depth);
      case "[":
        return this.#array(depth);
      case '"':
        return this.#string();
      case "t":
        return this.#word("true", true);
      case "f":
        return this.#word("false", false);
      case "n":
        return this.#word("null", null);
      default:
        return this.#number();
    }
  }

  #object(depth: number): Map<string, Json> {
    const result = new Map<string, Json>();
    this.#at += 1;
    this.#space();
    if (this.#take("}")) return result;
    for (;;) {
      this.#space();
      if (this.text[this.#at] !== '"') this.#fail("expected a field name in double quotes");
      const name = this.#string();
      this.#space();
      if (!this.#take(":")) this.#fail("expected ':'");
      const value = this.#value(depth + 1);
      if (result.has(name)) {
        throw new DecodeError("invalid-json", `the field ${JSON.stringify(name)} stands twice in one object`);
      }
      result.set(name, value);
      this.#space();
      if (this.#take("}")) return result;
      if (!this.#take(",")) this.#fail("expected ',' or '}'");
    }
  }

  #array(depth: number): Json[] {
    const result: Json[] = [];
    this.#at += 1;
    this.#space();
    if (this.#take("]")) return result;
    for (;;) {
      result.push(this.#value(depth + 1));
      this.#space();
      if (this.#take("]")) return result;
      if (!this.#take(",")) this.#fail("expected ',' or ']'");
    }
  }

  #string(): string {
    this.#at += 1;
    let result = "";
    for (;;) {
      PLAIN.lastIndex = this.#at;
      const plain = PLAIN.exec(this.text)![0];
      result += plain;
      this.#at += plain.length;
      if (this.#take('"')) return result;
      if (!this.#take("\\")) this.#fail(this.#at < this.text.length ? "control character in a string" : "unterminated string");
      const kind = this.text[this.#at] ?? "";
      this.#at += 1;
      if (kind === "u") {
        const digits = this.text.slice(this.#at, this.#at + 4);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) this.#fail("expected four hex digits after \\u");
        result += String.fromCharCode(Number.parseInt(digits, 16));
        this.#at += 4;
      } else {
        const escaped = ESCAPES[kind];
        if (escaped === undefined) this.#fail("unknown escape in a string");
        result += escaped;
      }
    }
  }

  #number(): number | bigint | JsonFloat {
    NUMBER.lastIndex = this.#at;
    const match = NUMBER.exec(this.text);
    if (match === null) this.#fail("expected a value");
    const text = match[0];
    this.#at += text.length;
    if (match[1] !== undefined || match[2] !== undefined) {
      if (!Number.isFinite(Number(text))) this.#fail("a number beyond what a float holds");
      return new JsonFloat(text);
    }
    if (text.length < 16) return Number(text) || 0;
    if (text.length > MAX_DIGITS + (text[0] === "-" ? 1 : 0)) {
      throw new DecodeError("invalid-json", "the line holds a number of too many digits");
    }
    return compact(BigInt(text));
  }

  #word<T>(word: string, value: T): T {
    if (!this.text.startsWith(word, this.#at)) this.#fail("expected a value");
    this.#at += word.length;
    return value;
  }

  #take(character: string): boolean {
    if (this.text[this.#at] !== character) return false;
    this.#at += 1;
    return true;
  }

  #space(): void {
    for (;;) {
      const code = this.text.charCodeAt(this.#at);
      if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return;
      this.#at += 1;
    }
  }

  #fail(what: string): never {
    throw new DecodeError("invalid-json", `the line is not JSON: ${what}, at column ${this.#at + 1}`);
  }
}

/** What `writeJson` takes: plain objects too. */
export type JsonLike =
  | null
  | boolean
  | number
  | bigint
  | JsonFloat
  | string
  | readonly JsonLike[]
  | ReadonlyMap<string, JsonLike>
  | { readonly [name: string]: JsonLike };

/** Writes one line of JSON without spaces; integers of any size as digits. */
export function writeJson(value: JsonLike): string {
  if (value === null || typeof value === "boolean" || typeof value === "bigint") return String(value);
  if (typeof value === "number" || typeof value === "string") return JSON.stringify(value);
  if (value instanceof JsonFloat) return value.text;
  if (isList(value)) return `[${value.map(writeJson).join(",")}]`;
  const entries = value instanceof Map ? [...value] : Object.entries(value as Record<string, JsonLike>);
  return `{${entries.map(([name, item]) => `${JSON.stringify(name)}:${writeJson(item as JsonLike)}`).join(",")}}`;
}

function isList(value: unknown): value is readonly JsonLike[] {
  return Array.isArray(value);
}
