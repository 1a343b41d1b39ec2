package kvhash;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.zip.GZIPInputStream;
import org.junit.jupiter.api.Test;

/** The hasher against what vLLM's own functions gave, case by case, and the API's own promises. */
class RecordedTest {
    private static final Path DATA = Path.of("../../tests/data/oracle/hash");
    private static final ObjectMapper JSON = new ObjectMapper();

    private static String read(Path path) throws IOException {
        try (InputStream in = new GZIPInputStream(Files.newInputStream(path))) {
            return new String(in.readAllBytes(), StandardCharsets.UTF_8);
        }
    }

    /** Every case of every recorded release is equal, and what a release cannot hash is refused. */
    @Test
    void recordedCasesAreEqual() throws IOException {
        Map<String, JsonNode> cases = new HashMap<>();
        for (JsonNode one : JSON.readTree(read(DATA.resolve("cases.json.gz")))) {
            cases.put(one.get("id").asText(), one);
        }
        assertEquals(357, cases.size());
        List<Path> files;
        try (var listed = Files.list(DATA)) {
            files = listed.filter(path -> path.toString().endsWith(".jsonl.gz")).sorted().toList();
        }
        assertEquals(19, files.size());
        int answered = 0;
        for (Path file : files) {
            String release = file.getFileName().toString().replace(".jsonl.gz", "");
            for (String line : read(file).lines().toList()) {
                JsonNode row = JSON.readTree(line);
                JsonNode got = answer(request(cases.get(row.get("id").asText()), release));
                if (row.has("error") || row.path("random_root").asBoolean()) {
                    assertTrue(got.has("error"), line);
                    continue;
                }
                for (String name : List.of("none_hash", "block_hashes", "external", "extra_keys")) {
                    assertEquals(row.get(name), got.get(name), release + " " + row.get("id") + " " + name);
                }
                answered++;
            }
        }
        assertTrue(answered > 2000, "only " + answered);
    }

    private static ObjectNode request(JsonNode one, String release) {
        ObjectNode request = JSON.createObjectNode().put("vllm", release);
        request.set("algorithm", one.get("algo"));
        request.set("hash_seed", one.get("seed"));
        request.set("cache_salt", one.get("salt"));
        request.set("multimodal", one.get("mm"));
        for (String name : List.of("block_size", "tokens", "lora", "prompt_embeds", "lookahead")) {
            request.set(name, one.get(name));
        }
        return request;
    }

    private static JsonNode answer(JsonNode request) throws IOException {
        return JSON.readTree(RequestLine.answer(JSON.writeValueAsBytes(request)));
    }

    /** The example of the README. */
    @Test
    void readmeExample() {
        BlockHasher hasher = new BlockHasher(Contract.forVllm("0.33.0"), "sha256_cbor", 4, "0", 0, 1);
        Object hash = hasher.chain(new long[] {1, 2, 3, 4}, RequestKeys.NONE).blockHashes().get(0);
        assertEquals("c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
                HexFormat.of().formatHex((byte[]) hash));
    }

    /** Tokens are unsigned: -1L is 2^64 - 1, which CBOR writes with an eight-byte head. */
    @Test
    void tokensAreUnsigned() {
        byte[] head = Cbor.encode(new java.math.BigInteger("18446744073709551615"));
        assertArrayEquals(HexFormat.of().parseHex("1bffffffffffffffff"), head);
    }

    /** A blank line has no answer; a bad one has an error with its code. */
    @Test
    void badLines() throws IOException {
        assertNull(RequestLine.answer(" \t\r\n".getBytes(StandardCharsets.UTF_8)));
        JsonNode got = JSON.readTree(RequestLine.answer("{".getBytes(StandardCharsets.UTF_8)));
        assertEquals("invalid-json", got.get("error").get("code").asText());
    }

    /** An item past the prompt's end is refused, with its code. */
    @Test
    void itemPastTheEnd() {
        BlockHasher hasher = new BlockHasher(Contract.forVllm("0.33.0"), "sha256", 4, "0", 0, 1);
        var item = new RequestKeys.MultimodalItem("i", 3, 2);
        var keys = new RequestKeys(null, null, List.of(item), null);
        KvHashException error = assertThrows(KvHashException.class, () -> hasher.chain(new long[4], keys));
        assertEquals("invalid-multimodal", error.code());
    }
}
