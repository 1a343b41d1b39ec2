package kvhash;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadConstraints;
import com.fasterxml.jackson.core.StreamReadFeature;
import com.fasterxml.jackson.core.json.JsonWriteFeature;
import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.json.JsonMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.NullNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.List;

/**
 * One request line in, one answer line out.
 *
 * <p>A bad line gives an error object. Fields are checked in the order in which every kvhash program checks them, so
 * that a line with several faults gets the same code everywhere. An unknown field is refused: a misspelt
 * {@code cache_salt} must not become a wrong hash.
 */
final class RequestLine {
    /** The longest line, its end not counted. */
    static final int MAX_BYTES = 8 * 1024 * 1024;

    /** As many digits as Python reads of an integer. */
    private static final int MAX_DIGITS = 4300;

    private static final JsonNodeFactory NODES = JsonNodeFactory.instance;
    private static final BigInteger MAX_TOKEN = BigInteger.ONE.shiftLeft(64).subtract(BigInteger.ONE);
    private static final List<String> FIELDS = List.of("tokens", "vllm", "algorithm", "hash_seed", "block_size",
            "lookahead", "decode_context_parallel_size", "lora", "cache_salt", "multimodal", "prompt_embeds");
    private static final JsonMapper JSON = JsonMapper.builder(JsonFactory.builder()
                    .enable(StreamReadFeature.STRICT_DUPLICATE_DETECTION)
                    .streamReadConstraints(StreamReadConstraints.builder()
                            .maxNestingDepth(500)
                            .maxNumberLength(MAX_BYTES)
                            .maxNameLength(MAX_BYTES)
                            .build())
                    .build())
            .enable(DeserializationFeature.FAIL_ON_TRAILING_TOKENS)
            .enable(JsonWriteFeature.ESCAPE_NON_ASCII) // an id may hold a lone surrogate
            .build();

    private RequestLine() {}

    /** Returns the answer line, or null for a blank line. */
    static String answer(byte[] line) {
        boolean tooLong = lengthWithoutEnd(line) > MAX_BYTES;
        if (!tooLong && isBlank(line)) {
            return null;
        }
        ObjectNode answer = NODES.objectNode();
        answer.set("id", NullNode.instance);
        try {
            if (tooLong) {
                throw new KvHashException("line-too-long",
                        "the line has more than the " + MAX_BYTES + " bytes that are read", null);
            }
            JsonNode request = parse(line);
            if (request.isObject() && request.has("id")) {
                answer.set("id", request.get("id"));
            }
            answer.setAll(hash(request));
        } catch (KvHashException error) {
            answer.putObject("error").put("code", error.code()).put("message", error.getMessage());
        }
        try {
            return JSON.writeValueAsString(answer);
        } catch (JsonProcessingException error) {
            throw new IllegalStateException(error);
        }
    }

    private static boolean isBlank(byte[] line) {
        for (byte b : line) {
            if (b != ' ' && (b < '\t' || b > '\r')) {
                return false;
            }
        }
        return true;
    }

    private static int lengthWithoutEnd(byte[] line) {
        int length = line.length;
        if (length == 0 || line[length - 1] != '\n') {
            return length;
        }
        return length > 1 && line[length - 2] == '\r' ? length - 2 : length - 1;
    }

    private static JsonNode parse(byte[] line) {
        String text;
        try {
            text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(line)).toString();
        } catch (CharacterCodingException error) {
            throw new KvHashException("invalid-utf8", "the line is not UTF-8", null);
        }
        try {
            checkNumbers(text);
            return JSON.readTree(text);
        } catch (JsonProcessingException error) {
            throw new KvHashException("invalid-json", "the line is not JSON: " + error.getOriginalMessage(), null);
        } catch (IOException error) {
            throw new UncheckedIOException(error); // a string is not read from anywhere
        }
    }

    /** Refuses numbers that other readers cannot hold, before any of them is made. */
    private static void checkNumbers(String text) throws IOException {
        try (JsonParser parser = JSON.createParser(text)) {
            for (JsonToken token = parser.nextToken(); token != null; token = parser.nextToken()) {
                if (token == JsonToken.VALUE_NUMBER_INT
                        && parser.getTextLength() - (parser.getTextCharacters()[parser.getTextOffset()] == '-' ? 1 : 0)
                                > MAX_DIGITS) {
                    throw new KvHashException("invalid-json", "the line holds a number of too many digits", null);
                }
                if (token == JsonToken.VALUE_NUMBER_FLOAT && Double.isInfinite(parser.getDoubleValue())) {
                    throw new KvHashException("invalid-json", "the line holds a number beyond what a double holds", null);
                }
            }
        }
    }

    private static ObjectNode hash(JsonNode line) {
        if (!line.isObject()) {
            throw new KvHashException("invalid-request", "expected a JSON object, got " + kind(line), "$");
        }
        ObjectNode request = ((ObjectNode) line).deepCopy();
        request.remove("id");
        checkFields(request, FIELDS, "invalid-request", "$");
        long[] tokens = tokens(request);
        // One part after the other, each with all its checks.
        String salt = text(request.get("cache_salt"), "invalid-salt", "$.cache_salt");
        RequestKeys keys = checked(new RequestKeys(null, salt, List.of(), null), tokens);
        keys = checked(new RequestKeys(null, salt, List.of(), embeds(request.get("prompt_embeds"))), tokens);
        RequestKeys.Lora lora = lora(request.get("lora"));
        keys = checked(new RequestKeys(lora, salt, items(request.get("multimodal")), keys.promptEmbeds()), tokens);
        if (request.has("vllm") && !request.get("vllm").isTextual()) {
            throw new KvHashException("invalid-request", "expected the vLLM release as text", "$.vllm");
        }
        BlockHasher hasher = hasher(request);
        BlockHasher.Chain chain = hasher.chain(tokens, keys);
        ObjectNode answer = NODES.objectNode();
        answer.set("none_hash", value(hasher.noneHash()));
        ArrayNode hashes = answer.putArray("block_hashes");
        chain.blockHashes().forEach(hash -> hashes.add(value(hash)));
        ArrayNode external = answer.putArray("external");
        chain.external().forEach(hash -> external.add(hash.toString()));
        ArrayNode extraKeys = answer.putArray("extra_keys");
        chain.extraKeys().forEach(extra -> extraKeys.add(key(extra)));
        return answer;
    }

    private static RequestKeys checked(RequestKeys keys, long[] tokens) {
        keys.checkAgainst(tokens.length);
        return keys;
    }

    private static BlockHasher hasher(ObjectNode request) {
        String release = request.has("vllm") ? request.get("vllm").textValue() : "latest";
        RequestKeys.checkText(release, "invalid-request", "$.vllm");
        Contract contract = Contract.forVllm(release);
        JsonNode algorithm = request.get("algorithm");
        if (algorithm != null && !algorithm.isTextual()) {
            throw new KvHashException("unknown-algorithm", "the algorithm must be text, got " + kind(algorithm),
                    "$.algorithm");
        }
        String name = algorithm == null ? "sha256" : algorithm.textValue();
        contract.algorithm(name);
        int blockSize = setting(request, "block_size", 16, 1, Integer.MAX_VALUE, "invalid-block-size");
        int dcp = setting(request, "decode_context_parallel_size", 1, 1, Integer.MAX_VALUE, "invalid-block-size");
        int lookahead = setting(request, "lookahead", 0, 0, 1 << 16, "invalid-request");
        BlockHasher.checkLookahead(contract, lookahead);
        String seed = text(request.get("hash_seed"), "invalid-seed", "$.hash_seed");
        return new BlockHasher(contract, name, blockSize, seed, lookahead, dcp);
    }

    private static int setting(ObjectNode request, String name, int fallback, long least, long most, String code) {
        JsonNode value = request.get(name);
        return isNull(value) ? fallback : (int) integer(value, least, most, code, "$." + name);
    }

    private static long[] tokens(ObjectNode request) {
        JsonNode list = request.get("tokens");
        if (list == null) {
            throw new KvHashException("invalid-request", "a request needs 'tokens', a list of token ids", "$.tokens");
        }
        if (!list.isArray()) {
            throw new KvHashException("invalid-token", "expected a list of token ids, got " + kind(list), "$.tokens");
        }
        long[] tokens = new long[list.size()];
        Iterator<JsonNode> values = list.elements();
        for (int i = 0; i < tokens.length; i++) {
            JsonNode value = values.next();
            boolean small = value.isIntegralNumber() && value.canConvertToLong() && value.longValue() >= 0;
            boolean large = value.isBigInteger() && value.bigIntegerValue().signum() > 0
                    && value.bigIntegerValue().compareTo(MAX_TOKEN) <= 0;
            if (!small && !large) {
                throw new KvHashException("invalid-token",
                        "expected a token id, an integer from 0 to 2^64 - 1, got " + kind(value),
                        "$.tokens[" + i + "]");
            }
            tokens[i] = value.bigIntegerValue().longValue();
        }
        return tokens;
    }

    private static RequestKeys.Lora lora(JsonNode value) {
        if (isNull(value)) {
            return null;
        }
        String code = "invalid-lora";
        checkFields(value, List.of("name", "path", "id"), code, "$.lora");
        JsonNode id = value.get("id");
        return new RequestKeys.Lora(
                text(value.get("name"), code, "$.lora.name"),
                text(value.get("path"), code, "$.lora.path"),
                isNull(id) ? null : integer(id, 1, Long.MAX_VALUE, code, "$.lora.id"));
    }

    private static List<RequestKeys.MultimodalItem> items(JsonNode list) {
        if (isNull(list)) {
            return List.of();
        }
        String code = "invalid-multimodal";
        if (!list.isArray()) {
            throw new KvHashException(code, "expected a list of items, got " + kind(list), "$.multimodal");
        }
        List<String> names = List.of("identifier", "offset", "length");
        List<RequestKeys.MultimodalItem> items = new ArrayList<>();
        for (JsonNode item : list) {
            String at = "$.multimodal[" + items.size() + "]";
            checkFields(item, names, code, at);
            needFields(item, names, code, at);
            String identifier = text(item.get("identifier"), code, at + ".identifier");
            if (identifier == null) {
                throw new KvHashException(code, "expected the identifier as text, got null", at + ".identifier");
            }
            items.add(new RequestKeys.MultimodalItem(identifier,
                    integer(item.get("offset"), 0, Long.MAX_VALUE, code, at + ".offset"),
                    integer(item.get("length"), 1, Long.MAX_VALUE, code, at + ".length")));
        }
        return items;
    }

    private static RequestKeys.PromptEmbeds embeds(JsonNode value) {
        if (isNull(value)) {
            return null;
        }
        String code = "invalid-prompt-embeds";
        String at = "$.prompt_embeds";
        List<String> names = List.of("shape", "dtype", "data");
        checkFields(value, names, code, at);
        needFields(value, names, code, at);
        JsonNode shape = value.get("shape");
        if (!shape.isArray() || shape.size() != 2) {
            throw new KvHashException(code, "expected [rows, hidden size], got " + kind(shape), at + ".shape");
        }
        if (!value.get("dtype").isTextual() || !value.get("data").isTextual()) {
            throw new KvHashException(code, "expected the dtype and the data (hex) as text", at);
        }
        return new RequestKeys.PromptEmbeds(
                integer(shape.get(0), 0, Long.MAX_VALUE, code, at + ".shape[0]"),
                integer(shape.get(1), 1, Long.MAX_VALUE, code, at + ".shape[1]"),
                value.get("dtype").textValue(),
                hex(value.get("data").textValue(), code, at + ".data"));
    }

    /** Reads hex in either case; white space may stand between bytes. */
    private static byte[] hex(String text, String code, String at) {
        StringBuilder digits = new StringBuilder(text.length());
        try {
            for (String run : text.split("[ \\t\\n\\r\\x0b\\f]+")) {
                if (run.length() % 2 != 0) {
                    throw new IllegalArgumentException("half a byte");
                }
                digits.append(run);
            }
            return HexFormat.of().parseHex(digits);
        } catch (IllegalArgumentException error) {
            throw new KvHashException(code, "the data is not hex", at);
        }
    }

    private static void checkFields(JsonNode value, List<String> allowed, String code, String at) {
        if (!value.isObject()) {
            throw new KvHashException(code, "expected an object, got " + kind(value), at);
        }
        value.fieldNames().forEachRemaining(name -> {
            if (!allowed.contains(name)) {
                throw new KvHashException(code,
                        "unknown field '" + name + "'; expected one of: " + String.join(", ", allowed), at);
            }
        });
    }

    private static void needFields(JsonNode value, List<String> names, String code, String at) {
        for (String name : names) {
            if (!value.has(name)) {
                throw new KvHashException(code, "'" + name + "' is missing", at);
            }
        }
    }

    private static boolean isNull(JsonNode value) {
        return value == null || value.isNull();
    }

    private static String text(JsonNode value, String code, String at) {
        if (isNull(value)) {
            return null;
        }
        if (!value.isTextual()) {
            throw new KvHashException(code, "expected text, got " + kind(value), at);
        }
        RequestKeys.checkText(value.textValue(), code, at);
        return value.textValue();
    }

    private static long integer(JsonNode value, long least, long most, String code, String at) {
        if (!value.isIntegralNumber()) {
            throw new KvHashException(code, "expected an integer, got " + kind(value), at);
        }
        if (!value.canConvertToLong() || value.longValue() < least || value.longValue() > most) {
            throw new KvHashException(code, "expected an integer from " + least + " to " + most, at);
        }
        return value.longValue();
    }

    private static String kind(JsonNode value) {
        return value.getNodeType().name().toLowerCase(java.util.Locale.ROOT);
    }

    /** A chain value: hex, or {"int": decimal}. */
    private static JsonNode value(Object hash) {
        return hash instanceof byte[] digest
                ? NODES.textNode(HexFormat.of().formatHex(digest))
                : NODES.objectNode().put("int", hash.toString());
    }

    /** Extra keys as JSON: bytes as {"bytes": hex}. */
    private static JsonNode key(Object value) {
        if (value == null) {
            return NullNode.instance;
        }
        if (value instanceof List<?> items) {
            ArrayNode list = NODES.arrayNode();
            items.forEach(item -> list.add(key(item)));
            return list;
        }
        if (value instanceof byte[] bytes) {
            return NODES.objectNode().put("bytes", HexFormat.of().formatHex(bytes));
        }
        if (value instanceof Ref ref) {
            return NODES.textNode(ref.text());
        }
        if (value instanceof Long number) {
            return NODES.numberNode(number);
        }
        return value instanceof BigInteger number ? NODES.numberNode(number) : NODES.textNode((String) value);
    }
}
