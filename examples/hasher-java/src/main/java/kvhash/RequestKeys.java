package kvhash;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/**
 * What besides the tokens goes into the hashes of one request's blocks.
 *
 * <p>Order within a block, in every release: LoRA, multimodal items by offset, salt (block 0 only), prompt embeddings.
 * An empty salt is no salt; each part may be null. What each looks like in a release is data of its {@link Contract}.
 */
public record RequestKeys(Lora lora, String cacheSalt, List<MultimodalItem> multimodal, PromptEmbeds promptEmbeds) {

    /** A request that adds nothing. */
    public static final RequestKeys NONE = new RequestKeys(null, null, List.of(), null);

    // The tags. Each is one constant object in vLLM's code, so a second use in a block is a back-reference in pickle.
    private static final Ref LORA = new Ref("lora");
    private static final Ref MM = new Ref("mm");
    private static final Ref CACHE_SALT = new Ref("cache_salt");
    private static final Ref PROMPT_EMBEDS = new Ref("prompt_embeds");
    private static final Map<String, Integer> DTYPE_SIZES = Map.of("float32", 4, "float16", 2, "bfloat16", 2);

    /** Checks each part, in the order in which every kvhash program does. */
    public RequestKeys {
        if (cacheSalt != null) {
            checkText(cacheSalt, "invalid-salt", "$.cache_salt");
        }
        multimodal = List.copyOf(multimodal);
        for (int i = 1; i < multimodal.size(); i++) {
            String at = "$.multimodal[" + i + "].offset";
            if (multimodal.get(i).offset() < multimodal.get(i - 1).offset()) {
                throw new KvHashException("invalid-multimodal", "items must be sorted by offset", at);
            }
            if (multimodal.get(i).offset() < multimodal.get(i - 1).end()) {
                throw new KvHashException("invalid-multimodal", "items must not overlap", at);
            }
        }
    }

    /** A LoRA adapter; which of the fields is hashed depends on the release, and the others may be null. */
    public record Lora(String name, String path, Long id) {
        public Lora {
            for (String text : Arrays.asList(name, path)) {
                if (text != null && text.isEmpty()) {
                    throw new KvHashException("invalid-lora", "the adapter's name or path is empty", "$.lora");
                }
                if (text != null) {
                    checkText(text, "invalid-lora", "$.lora");
                }
            }
            if (id != null && id < 1) {
                throw new KvHashException("invalid-lora", "expected an id of at least 1, got " + id, "$.lora.id");
            }
        }
    }

    /** An image, audio or video: its content identifier and the placeholder tokens that it fills. */
    public record MultimodalItem(String identifier, long offset, long length) {
        public MultimodalItem {
            checkText(identifier, "invalid-multimodal", "$.multimodal");
            if (offset < 0 || length < 1) {
                throw new KvHashException("invalid-multimodal",
                        "expected an offset of at least 0 and a length of at least 1, got " + offset + " and " + length,
                        "$.multimodal");
            }
        }

        long end() {
            return offset > Long.MAX_VALUE - length ? Long.MAX_VALUE : offset + length;
        }
    }

    /** Prompt embeddings: a matrix, one row per token, as row-major little-endian bytes. */
    public record PromptEmbeds(long rows, long hiddenSize, String dtype, byte[] data) {
        public PromptEmbeds {
            Integer size = DTYPE_SIZES.get(dtype);
            if (size == null) {
                throw new KvHashException("invalid-prompt-embeds",
                        "unknown dtype; expected one of: float32, float16, bfloat16", "$.prompt_embeds.dtype");
            }
            if (rows < 0 || hiddenSize < 1) {
                throw new KvHashException("invalid-prompt-embeds",
                        "expected at least 0 rows and a hidden size of at least 1", "$.prompt_embeds.shape");
            }
            // With rows, a row is no longer than the data, so nothing overflows once this holds.
            boolean fits = rows == 0
                    ? data.length == 0
                    : data.length % rows == 0 && data.length / rows % size == 0 && data.length / rows / size == hiddenSize;
            if (!fits) {
                throw new KvHashException("invalid-prompt-embeds",
                        rows + " rows of " + hiddenSize + " " + dtype + " are not " + data.length + " bytes",
                        "$.prompt_embeds.data");
            }
            data = data.clone();
        }

        /** Returns the bytes of some rows; rows that do not exist are left out, as vLLM's slice does. */
        byte[] slice(long start, long end) {
            long first = Math.min(start, rows);
            long last = Math.min(end, rows);
            long size = rows == 0 ? 0 : data.length / rows;
            return Arrays.copyOfRange(data, (int) (first * size), (int) (last * size));
        }
    }

    /** Refuses items past the prompt's end and embeddings with fewer rows than tokens. */
    void checkAgainst(int numTokens) {
        if (promptEmbeds != null && promptEmbeds.rows() < numTokens) {
            throw new KvHashException("invalid-prompt-embeds",
                    promptEmbeds.rows() + " rows for " + numTokens + " tokens; expected a row per token",
                    "$.prompt_embeds.shape[0]");
        }
        for (int i = 0; i < multimodal.size(); i++) {
            if (multimodal.get(i).end() > numTokens) {
                throw new KvHashException("invalid-multimodal",
                        "the item ends at " + multimodal.get(i).end() + ", past the " + numTokens
                                + " tokens of the prompt",
                        "$.multimodal[" + i + "].length");
            }
        }
    }

    /** Returns the adapter's part of every block's key; throws {@code invalid-lora} when a needed part is missing. */
    List<Object> loraKeys(Contract contract) {
        if (lora == null) {
            return List.of();
        }
        if (contract.loraKey().equals("id")) {
            return List.of(needed(lora.id(), "id", contract));
        }
        Object name = needed(lora.name(), "name", contract);
        if (contract.loraKey().equals("name")) {
            return List.of(name);
        }
        return List.of(List.of(LORA, name, needed(lora.path(), "path", contract)));
    }

    private static Object needed(Object value, String what, Contract contract) {
        if (value == null) {
            throw new KvHashException("invalid-lora",
                    "vLLM " + contract.release() + " hashes the adapter's " + what + ", and none was given",
                    "$.lora." + what);
        }
        return value;
    }

    /**
     * Returns the extra keys of the tokens {@code start} to {@code end} as the contract hashes them, null where there
     * are none.
     */
    List<Object> block(Contract contract, long start, long end) {
        List<Object> keys = new ArrayList<>(loraKeys(contract));
        for (MultimodalItem item : multimodal) {
            if (item.offset() >= end) {
                break;
            }
            if (item.end() <= start) {
                continue;
            }
            if (!contract.multimodalOffset()) {
                keys.add(item.identifier());
            } else if (contract.taggedKeys()) {
                keys.add(List.of(MM, item.identifier(), item.offset() - start));
            } else {
                keys.add(List.of(item.identifier(), item.offset() - start));
            }
        }
        if (cacheSalt != null && !cacheSalt.isEmpty() && start == 0) {
            keys.add(contract.taggedKeys() ? List.of(CACHE_SALT, cacheSalt) : cacheSalt);
        }
        if (promptEmbeds != null && !contract.promptEmbedsKey().equals("absent")) {
            byte[] rows = promptEmbeds.slice(start, end);
            byte[] content = contract.promptEmbedsKey().equals("bytes") ? rows : Digests.sha256(rows);
            keys.add(contract.taggedKeys() ? List.of(PROMPT_EMBEDS, content) : content);
        }
        return keys.isEmpty() ? null : keys;
    }

    /** Refuses a text that UTF-8 cannot carry. */
    static void checkText(String text, String code, String at) {
        if (!StandardCharsets.UTF_8.newEncoder().canEncode(text)) {
            throw new KvHashException(code, "the text holds a lone surrogate, which UTF-8 cannot carry", at);
        }
    }
}
