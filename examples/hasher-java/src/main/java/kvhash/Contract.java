package kvhash;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * What decides the block hashes of one vLLM release, read from the table that the Python SDK defines.
 *
 * <p>{@code chainValuesAreInts}: the chain holds integers, not digests. {@code defaultSeed}: the seed of NONE_HASH
 * without PYTHONHASHSEED for collision-resistant algorithms, null where it is random. {@code loraKey}: {@code id},
 * {@code name} or {@code name_and_path}. {@code promptEmbedsKey}: {@code absent}, {@code bytes} or {@code sha256}.
 */
public record Contract(
        Release release,
        List<String> algorithms,
        boolean chainValuesAreInts,
        String defaultSeed,
        String loraKey,
        boolean multimodalOffset,
        String promptEmbedsKey,
        boolean taggedKeys,
        boolean lookahead) {

    /** A vLLM release. A fourth number, pre-release and local parts do not change the contract. */
    public record Release(int major, int minor, int patch) implements Comparable<Release> {
        private static final Pattern FORM = Pattern.compile(
                "v?([0-9]{1,6})\\.([0-9]{1,6})(?:\\.([0-9]{1,6}))?(?:\\.([0-9]{1,6}))?"
                        + "(?:[-_.]?(?:alpha|beta|pre|post|dev|rc|a|b)[-_.]?[0-9]{0,9}){0,4}(?:\\+[a-z0-9._-]*)?",
                Pattern.CASE_INSENSITIVE);

        static Release parse(String text) {
            Matcher match = FORM.matcher(strip(text));
            if (text.length() > 100 || !match.matches()) {
                String shown = text.length() > 60 ? text.substring(0, 60) + "..." : text;
                throw new KvHashException("unknown-release",
                        "'" + shown + "' is not a vLLM release; expected one such as 0.30.0 or 'latest'", null);
            }
            String patch = match.group(3);
            return new Release(Integer.parseInt(match.group(1)), Integer.parseInt(match.group(2)),
                    patch == null ? 0 : Integer.parseInt(patch));
        }

        @Override
        public int compareTo(Release other) {
            int order = Integer.compare(major, other.major);
            order = order != 0 ? order : Integer.compare(minor, other.minor);
            return order != 0 ? order : Integer.compare(patch, other.patch);
        }

        @Override
        public String toString() {
            return major + "." + minor + "." + patch;
        }
    }

    /** A serialization ({@code pickle5} or {@code cbor}), a digest, and whether only its low 64 bits are kept. */
    public record Algorithm(String name, boolean pickle, boolean sha256, boolean keepsLow64) {}

    /** What Python calls white space around a text goes; Java's own is without the no-break spaces. */
    private static String strip(String text) {
        int start = 0;
        int end = text.length();
        while (start < end && isSpace(text.charAt(start))) {
            start++;
        }
        while (end > start && isSpace(text.charAt(end - 1))) {
            end--;
        }
        return text.substring(start, end);
    }

    private static boolean isSpace(char c) {
        return Character.isWhitespace(c) || Character.isSpaceChar(c) || c == '\u0085';
    }

    private static final JsonNode TABLE = readTable();

    private static JsonNode readTable() {
        try (InputStream in = Contract.class.getResourceAsStream("/kvhash/contract.json")) {
            return new ObjectMapper().readTree(in);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /**
     * Returns the contract of a vLLM release, or of the newest known one for {@code latest}; a newer release works as
     * the newest known one. Throws {@code unknown-release} for what is no version, or too old to be reproduced.
     */
    public static Contract forVllm(String text) {
        Release newest = Release.parse(TABLE.get("newest").textValue());
        Release oldest = Release.parse(TABLE.get("oldest").textValue());
        Release asked = strip(text).toLowerCase(Locale.ROOT).equals("latest") ? newest : Release.parse(text);
        if (asked.compareTo(oldest) < 0) {
            throw new KvHashException("unknown-release", "vLLM " + asked + " is older than " + oldest
                    + ", the first release whose block hashes can be reproduced; expected " + oldest + " to " + newest,
                    null);
        }
        JsonNode row = null;
        for (JsonNode candidate : TABLE.get("rows")) {
            if (Release.parse(candidate.get("since").textValue()).compareTo(asked) <= 0) {
                row = candidate;
            }
        }
        List<String> algorithms = new ArrayList<>();
        row.get("algorithms").forEach(name -> algorithms.add(name.textValue()));
        return new Contract(
                asked,
                List.copyOf(algorithms),
                row.get("chain_values").textValue().equals("int"),
                row.get("default_seed").textValue(),
                row.get("lora_key").textValue(),
                row.get("multimodal_key").textValue().equals("identifier_and_offset"),
                row.get("prompt_embeds_key").textValue(),
                row.get("tagged_keys").booleanValue(),
                row.get("lookahead").booleanValue());
    }

    /**
     * Returns the algorithm of that name; throws {@code unknown-algorithm}, {@code algorithm-not-in-release} or
     * {@code algorithm-not-reproducible}.
     */
    public Algorithm algorithm(String name) {
        String expected = String.join(", ", algorithms);
        if ("builtin".equals(name)) {
            throw new KvHashException("algorithm-not-reproducible",
                    "algorithm 'builtin' is Python's own hash(), which differs by process and by build, so its block"
                            + " hashes cannot be reproduced; start vLLM with one of: " + expected,
                    "$.algorithm");
        }
        for (JsonNode row : TABLE.get("algorithms")) {
            if (!row.get("name").textValue().equals(name)) {
                continue;
            }
            if (!algorithms.contains(name)) {
                throw new KvHashException("algorithm-not-in-release",
                        "vLLM " + release + " has no algorithm '" + name + "'; it has: " + expected, "$.algorithm");
            }
            return new Algorithm(name, row.get("serialization").textValue().equals("pickle5"),
                    row.get("digest").textValue().equals("sha256"), row.get("keeps").textValue().equals("low64"));
        }
        throw new KvHashException("unknown-algorithm",
                "unknown algorithm '" + name + "'; vLLM " + release + " has: " + expected, "$.algorithm");
    }
}
