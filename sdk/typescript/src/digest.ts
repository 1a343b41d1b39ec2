/** The digests: SHA-256 and XXH3-128 (seed 0), bytes in, bytes out, most significant byte first. */

import { sha256 as nobleSha256 } from "@noble/hashes/sha2.js";
import { createXXHash128, type IHasher } from "hash-wasm";

import { KvHashError } from "./errors.js";

/** Returns the SHA-256 digest, 32 bytes. */
export function sha256(data: Uint8Array): Uint8Array {
  return nobleSha256(data);
}

// Compiling WebAssembly is asynchronous, so it happens once, when this module loads. Where it is forbidden (a page
// whose content security policy lacks 'wasm-unsafe-eval') only the xxhash algorithms are refused, with a typed error.
const xxh: IHasher | null = await createXXHash128(0, 0).catch(() => null);

/** Returns the XXH3 128-bit digest, 16 bytes; throws `missing-dependency` where WebAssembly is not allowed. */
export function xxh3_128(data: Uint8Array): Uint8Array {
  if (xxh === null) {
    throw new KvHashError(
      "missing-dependency",
      "XXH3 needs WebAssembly, which is not allowed here; allow 'wasm-unsafe-eval' or use sha256 or sha256_cbor",
    );
  }
  return xxh.init().update(data).digest("binary");
}
