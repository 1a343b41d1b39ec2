package kvhash;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assertions.fail;

import com.fasterxml.jackson.core.StreamReadFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.json.JsonMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The hasher answers the corpus: vectors/ of the repository, or the folder that KVHASH_VECTORS names. */
class VectorsTest {
    private static final JsonMapper JSON =
            JsonMapper.builder().enable(StreamReadFeature.STRICT_DUPLICATE_DETECTION).build();
    private static final HexFormat HEX = HexFormat.of();

    private static JsonNode vectors(String kind) throws IOException {
        String named = System.getenv("KVHASH_VECTORS");
        Path folder = Path.of(named == null || named.isEmpty() ? "../../vectors" : named);
        JsonNode found = JSON.readTree(folder.resolve(kind + ".json").toFile()).get("vectors");
        assertTrue(found.size() > 0, kind);
        return found;
    }

    /** The bytes of a generated input: SHA-256(seed || counter), one after the other. */
    private static final class Stream {
        private final byte[] seed;
        private long counter;
        private ByteBuffer left = ByteBuffer.allocate(0);

        Stream(String seed) {
            this.seed = seed.getBytes(StandardCharsets.UTF_8);
        }

        long token(long vocabulary) {
            if (!left.hasRemaining()) {
                ByteBuffer message = ByteBuffer.allocate(seed.length + 8).put(seed).putLong(counter++);
                left = ByteBuffer.wrap(Digests.sha256(message.array()));
            }
            return Integer.toUnsignedLong(left.getInt()) % vocabulary;
        }
    }

    private static long[] generated(JsonNode spec) {
        Stream stream = new Stream(spec.get("seed").asText());
        long[] tokens = new long[spec.get("count").asInt()];
        for (int i = 0; i < tokens.length; i++) {
            tokens[i] = stream.token(spec.get("vocabulary").asLong());
        }
        return tokens;
    }

    private static void check(JsonNode vector, byte[] line) throws IOException {
        String answer = RequestLine.answer(line);
        String id = vector.get("id").asText();
        ObjectNode got = (ObjectNode) JSON.readTree(answer);
        JsonNode expected = vector.get("expected");
        if (expected.has("error")) {
            String code = got.path("error").path("code").asText();
            for (JsonNode accepted : expected.get("error").get("codes")) {
                if (accepted.asText().equals(code)) {
                    return;
                }
            }
            fail(id + ": answered " + answer + ", want " + expected);
        }
        got.remove("id");
        if (vector.has("accepted")) {
            for (JsonNode choice : vector.get("accepted")) {
                if (choice.equals(got)) {
                    return;
                }
            }
        }
        assertEquals(expected, got, id);
    }

    /** Every request of the corpus is answered as it says, at the first and the last release of its range. */
    @ParameterizedTest
    @ValueSource(strings = {
        "none_hash", "chains", "extra_keys", "lookahead", "context_parallel", "recorded", "requests"
    })
    void requestsAreAnswered(String kind) throws IOException {
        int asked = 0;
        for (JsonNode vector : vectors(kind)) {
            JsonNode input = vector.get("input");
            if (input.has("line")) {
                check(vector, input.get("line").asText().getBytes(StandardCharsets.UTF_8));
                asked++;
                continue;
            }
            ObjectNode request = input.get("request").deepCopy();
            if (request.path("tokens").has("generate")) {
                ArrayNode tokens = JSON.createArrayNode();
                for (long token : generated(request.get("tokens").get("generate"))) {
                    tokens.add(token);
                }
                request.set("tokens", tokens);
            }
            for (JsonNode release : input.get("vllm")) {
                check(vector, JSON.writeValueAsBytes(request.set("vllm", release)));
                asked++;
            }
        }
        assertTrue(asked >= 50, kind);
    }

    private static Object value(JsonNode json, Map<Integer, Ref> same) {
        if (json.isNull()) {
            return null;
        }
        if (json.isArray()) {
            List<Object> items = new ArrayList<>();
            json.forEach(item -> items.add(value(item, same)));
            return items;
        }
        if (json.has("int")) {
            return new BigInteger(json.get("int").asText());
        }
        if (json.has("bytes")) {
            return HEX.parseHex(json.get("bytes").asText());
        }
        if (json.has("repeat")) {
            return json.get("repeat").asText().repeat(json.get("count").asInt());
        }
        if (json.has("tokens")) {
            List<Object> items = new ArrayList<>();
            for (long token : generated(json.get("tokens"))) {
                items.add(token);
            }
            return items;
        }
        String text = json.get("text").asText();
        return json.has("same") ? same.computeIfAbsent(json.get("same").asInt(), number -> new Ref(text)) : text;
    }

    /** Every head width, frame boundary and back-reference is written byte for byte. */
    @Test
    void preimagesAreSerialized() throws IOException {
        for (JsonNode vector : vectors("serialization")) {
            JsonNode input = vector.get("input");
            Object preimage = value(input.get("value"), new HashMap<>());
            boolean cbor = input.get("serialization").asText().equals("cbor");
            byte[] bytes = cbor ? Cbor.encode(preimage) : Pickle5.encode(preimage);
            String id = vector.get("id").asText();
            if (vector.has("serialized")) {
                assertEquals(vector.get("serialized").asText(), HEX.formatHex(bytes), id);
            }
            assertEquals(vector.get("serialized_length").asInt(), bytes.length, id);
            assertEquals(vector.get("digests").get("sha256").asText(), HEX.formatHex(Digests.sha256(bytes)), id);
            assertEquals(vector.get("digests").get("xxh3_128").asText(), HEX.formatHex(Digests.xxh3(bytes)), id);
        }
    }

    /** A hundred thousand blocks of each algorithm, with salts and adapters, end in one digest. */
    @Test
    void chainsEndInOneDigest() throws IOException, NoSuchAlgorithmException {
        for (JsonNode vector : vectors("accumulated")) {
            JsonNode input = vector.get("input");
            int count = input.get("blocks").asInt() * input.get("block_size").asInt();
            for (JsonNode release : input.get("vllm")) {
                Stream stream = new Stream(input.get("stream").asText());
                MessageDigest total = MessageDigest.getInstance("SHA-256");
                for (int k = 0; k < input.get("chains").asInt(); k++) {
                    BlockHasher hasher = new BlockHasher(Contract.forVllm(release.asText()),
                            input.get("algorithm").asText(), input.get("block_size").asInt(), "" + k, 0, 1);
                    long[] tokens = new long[count];
                    for (int i = 0; i < count; i++) {
                        tokens[i] = stream.token(input.get("vocabulary").asLong());
                    }
                    var lora = k > 0 && k % 3 == 0 ? new RequestKeys.Lora("lora-" + k, "path-" + k, (long) k) : null;
                    var keys = new RequestKeys(lora, k % 2 == 1 ? "salt-" + k : null, List.of(), null);
                    for (Object hash : hasher.chain(tokens, keys).blockHashes()) {
                        total.update(hash instanceof byte[] digest
                                ? digest : hash.toString().getBytes(StandardCharsets.US_ASCII));
                    }
                }
                assertEquals(vector.get("digest").asText(), HEX.formatHex(total.digest()), vector.get("id").asText());
            }
        }
    }
}
