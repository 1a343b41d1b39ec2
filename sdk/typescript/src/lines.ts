#!/usr/bin/env node
/**
 * The request-line program: answers lines from standard input on standard output, in order, one for one.
 *
 * Hash requests, and event lines `{"id":..,"decode":"<hex>"}`. The only module that needs Node.
 */

import { writeSync } from "node:fs";

import { decodeLine } from "./events/line.js";
import { MAX_LINE_BYTES, answerLine } from "./request.js";

const NEWLINE = 0x0a;
const HANDLERS = new Map([["decode", decodeLine]]);

/** Yields lines with their ends; of one that is too long only the first bytes, the rest is read past. */
async function* boundedLines(input: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  let parts: Uint8Array[] = [];
  let kept = 0;
  for await (const chunk of input) {
    let start = 0;
    while (start < chunk.length) {
      const found = chunk.indexOf(NEWLINE, start);
      const stop = found < 0 ? chunk.length : found + 1;
      const part = chunk.subarray(start, Math.min(stop, start + MAX_LINE_BYTES + 2 - kept));
      parts.push(part);
      kept += part.length;
      start = stop;
      if (found >= 0) {
        yield Buffer.concat(parts);
        parts = [];
        kept = 0;
      }
    }
  }
  if (kept) yield Buffer.concat(parts);
}

function print(text: string): void {
  const bytes = Buffer.from(`${text}\n`);
  for (let written = 0; written < bytes.length; ) {
    try {
      written += writeSync(1, bytes, written);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EAGAIN") throw error;
    }
  }
}

try {
  for await (const line of boundedLines(process.stdin)) {
    const answered = answerLine(line, HANDLERS);
    if (answered !== null) print(answered);
  }
} catch (error) {
  if ((error as NodeJS.ErrnoException).code !== "EPIPE") throw error;
}
