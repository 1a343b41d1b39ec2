/** The SDK against what vLLM's own functions gave, case by case. */

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";

import { KvHashError, answer, parseJson, parseRequest, writeJson, type Json } from "../src/index.js";

const DATA = fileURLToPath(new URL("../../../../tests/data/oracle/hash/", import.meta.url));
const read = (name: string): string => gunzipSync(readFileSync(DATA + name)).toString();
const field = (value: Json, name: string): Json => (value as Map<string, Json>).get(name) ?? null;

const cases = new Map((parseJson(read("cases.json.gz")) as Json[]).map((one) => [field(one, "id"), one]));
const files = readdirSync(DATA).filter((name) => name.endsWith(".jsonl.gz"));

test("all recorded releases are here", () => {
  assert.equal(files.length, 19);
  assert.equal(cases.size, 357);
});

for (const file of files) {
  const release = file.replace(".jsonl.gz", "");
  test(`every case of ${release} is equal`, () => {
    let answered = 0;
    for (const line of read(file).trim().split("\n")) {
      const row = parseJson(line);
      const request = requestOf(cases.get(field(row, "id"))!, release);
      if (field(row, "error") !== null || field(row, "random_root") === true) {
        assert.throws(() => answer(parseRequest(request)), KvHashError);
        continue;
      }
      const got = parseJson(writeJson(answer(parseRequest(request))));
      for (const name of ["none_hash", "block_hashes", "external", "extra_keys"]) {
        assert.deepEqual(field(got, name), field(row, name), String(field(row, "id")));
      }
      answered += 1;
    }
    assert.ok(answered > 50);
  });
}

function requestOf(one: Json, release: string): Json {
  const request = new Map<string, Json>([["vllm", release]]);
  const names = { algo: "algorithm", seed: "hash_seed", salt: "cache_salt", mm: "multimodal" };
  const same = ["block_size", "tokens", "lora", "prompt_embeds", "lookahead"].map((name) => [name, name] as const);
  for (const [from, to] of [...Object.entries(names), ...same]) {
    const value = field(one, from);
    if (value !== null) request.set(to, value);
  }
  return request;
}
