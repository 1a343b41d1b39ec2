/**
 * Every error that kvhash throws on purpose: one class, told apart by its stable `code`.
 *
 * `code` never changes once released, messages may; `at` is the place in the request
 * (`$.multimodal[1].offset`), null where there is none. The codes are those of the Python SDK.
 */

export type ErrorCode =
  | "unknown-release"
  | "unknown-algorithm"
  | "algorithm-not-in-release"
  | "algorithm-not-reproducible"
  | "unknown-root"
  | "feature-not-in-release"
  | "invalid-request"
  | "invalid-block-size"
  | "invalid-token"
  | "invalid-seed"
  | "invalid-salt"
  | "invalid-lora"
  | "invalid-multimodal"
  | "invalid-prompt-embeds"
  | "invalid-hash"
  | "missing-dependency"
  | "invalid-json"
  | "invalid-utf8"
  | "line-too-long"
  | "invalid-batch"
  | "invalid-msgpack"
  | "nested-too-deeply"
  | "payload-too-large";

/** What went wrong (`message`, `code`) and where (`at`). */
export class KvHashError extends Error {
  override readonly name: string = "KvHashError";
  readonly code: ErrorCode;
  readonly at: string | null;
  /** The message without the place. */
  readonly detail: string;

  constructor(code: ErrorCode, message: string, at: string | null = null) {
    super(at === null ? message : `${message} - at ${at}`);
    this.code = code;
    this.at = at;
    this.detail = message;
  }
}

/** Bytes or text that cannot be read: a request line that is no JSON, a payload that is no batch. */
export class DecodeError extends KvHashError {
  override readonly name: string = "DecodeError";
}
