/**
 * kvhash: the KV-cache block hashes that vLLM computes and the KV events that it publishes, outside vLLM.
 *
 * For Node 20 and later and for browsers; see the README.
 */

export {
  externalHash,
  getBlockHash,
  getGroupId,
  jsonHash,
  low64,
  makeBlockHashWithGroupId,
  type BlockHash,
  type ExternalForm,
} from "./block-hash.js";
export { coarserHashes, resolveBlockSizes, type BlockSizeOptions, type BlockSizes } from "./block-size.js";
export { encodeCbor } from "./cbor.js";
export { Contract, Release, type Algorithm, type EventContract, type EventField } from "./contract.js";
export { DecodeError, KvHashError, type ErrorCode } from "./errors.js";
export { MAX_PAYLOAD_BYTES, decodeBatch } from "./events/decode.js";
export { decodeLine } from "./events/line.js";
export { MsgpackExt, MsgpackFloat, type MsgpackValue } from "./events/msgpack.js";
export {
  hashKey,
  type AllBlocksCleared,
  type BlockRemoved,
  type BlockStored,
  type Event,
  type EventBatch,
  type Extra,
  type HashValue,
  type UndecodableEvent,
  type UnknownEvent,
} from "./events/types.js";
export { type ExtraKeys, type Lora, type MultimodalItem, type PromptEmbeds, type RequestOptions } from "./extra-keys.js";
export { BlockHasher, Chain, HashFunction, noneHash, type HasherOptions } from "./hasher.js";
export { JsonFloat, parseJson, parseJsonBytes, writeJson, type Json, type JsonLike } from "./json.js";
export { encodePickle5 } from "./pickle5.js";
export { MAX_LINE_BYTES, answer, answerLine, parseRequest, type HashRequest } from "./request.js";
export { Ref, toHex, type Int, type TokenIds, type Value } from "./values.js";
