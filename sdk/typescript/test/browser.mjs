/**
 * The request-line program run inside a headless Chromium: lines on standard input, answers on standard output.
 *
 *     node test/browser.mjs /usr/bin/chromium < lines.jsonl
 */

import { fileURLToPath } from "node:url";

import { build } from "esbuild";
import { chromium } from "playwright-core";

const entry = fileURLToPath(new URL("../dist/index.js", import.meta.url));
const bundle = await build({
  stdin: {
    contents: `import * as kvhash from ${JSON.stringify(entry)}; globalThis.kvhash = kvhash;`,
    resolveDir: fileURLToPath(new URL("..", import.meta.url)),
  },
  bundle: true,
  format: "esm",
  platform: "browser",
  target: "es2022",
  write: false,
});

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const input = Buffer.concat(chunks).toString("base64");

const browser = await chromium.launch({
  executablePath: process.argv[2],
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
  timeout: 60_000,
});
try {
  const page = await browser.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(error));
  await page.setContent("<!doctype html><title>kvhash</title>");
  await page.addScriptTag({ content: bundle.outputFiles[0].text, type: "module" });
  await page.waitForFunction(() => "kvhash" in globalThis, undefined, { timeout: 30_000 });
  const answers = await page.evaluate(async (encoded) => {
    if (typeof process !== "undefined") throw new Error("this is not a browser");
    const { answerLine, decodeLine } = globalThis.kvhash;
    const handlers = new Map([["decode", decodeLine]]);
    const bytes = new Uint8Array(await (await fetch(`data:;base64,${encoded}`)).arrayBuffer());
    const answered = [];
    for (let start = 0; start < bytes.length; ) {
      const found = bytes.indexOf(0x0a, start);
      const stop = found < 0 ? bytes.length : found + 1;
      const answer = answerLine(bytes.subarray(start, stop), handlers);
      if (answer !== null) answered.push(answer);
      start = stop;
    }
    return answered;
  }, input);
  if (faults.length) throw faults[0];
  process.stdout.write(answers.map((answer) => `${answer}\n`).join(""));
} finally {
  await browser.close();
}
