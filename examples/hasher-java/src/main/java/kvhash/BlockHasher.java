package kvhash;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;

/**
 * Computes the block hashes of one engine's settings: {@code H(serialize((parent, tokens, extra_keys)))}, chained from
 * NONE_HASH. Immutable.
 *
 * <p>Only a full block has a hash. With look-ahead L the key slot becomes {@code (extra_keys, tok_1 .. tok_L)} with the
 * L tokens after the block, the extra keys are those of the block and of these tokens, and the block is hashed once
 * they exist. A chain value is a {@code byte[]} (the digest), or before vLLM 0.10.2 a {@code BigInteger}.
 */
public final class BlockHasher {
    private final Contract contract;
    private final Contract.Algorithm algorithm;
    private final long span;
    private final int lookahead;
    private final Object noneHash;

    /**
     * {@code hashSeed} is PYTHONHASHSEED of the engine, null where unset. A hash covers {@code blockSize} times
     * {@code decodeContextParallelSize} tokens. Throws {@link KvHashException} for what the release does not have.
     */
    public BlockHasher(Contract contract, String algorithm, int blockSize, String hashSeed, int lookahead,
            int decodeContextParallelSize) {
        this.contract = contract;
        this.algorithm = contract.algorithm(algorithm);
        if (blockSize < 1 || decodeContextParallelSize < 1) {
            throw new KvHashException("invalid-block-size",
                    "expected a block size and a context parallel size of at least 1", "$.block_size");
        }
        checkLookahead(contract, lookahead);
        this.span = (long) blockSize * decodeContextParallelSize;
        this.lookahead = lookahead;
        this.noneHash = noneHash(hashSeed);
    }

    static void checkLookahead(Contract contract, int lookahead) {
        if (lookahead < 0) {
            throw new KvHashException("invalid-request", "expected a look-ahead of at least 0", "$.lookahead");
        }
        if (lookahead > 0 && !contract.lookahead()) {
            throw new KvHashException("feature-not-in-release",
                    "vLLM " + contract.release() + " has no look-ahead hashing; expected a look-ahead of 0",
                    "$.lookahead");
        }
    }

    /** The hash of the seed as a text string; the empty text is a seed. */
    private Object noneHash(String hashSeed) {
        if (hashSeed != null) {
            RequestKeys.checkText(hashSeed, "invalid-seed", "$.hash_seed");
        }
        String seed = hashSeed;
        if (seed == null && algorithm.sha256()) {
            seed = contract.defaultSeed();
        }
        if (seed == null) {
            throw new KvHashException("unknown-root",
                    "vLLM " + contract.release() + " draws NONE_HASH at random for " + algorithm.name()
                            + " when PYTHONHASHSEED is not set, so its block hashes cannot be reproduced; set"
                            + " PYTHONHASHSEED in the engine's environment and give the same value as the hash seed",
                    "$.hash_seed");
        }
        return hash(seed);
    }

    /** The parent of block 0. */
    public Object noneHash() {
        return noneHash;
    }

    /** The hashes of a prompt's full blocks, and what was hashed besides the tokens: null, or a list. */
    public record Chain(List<Object> blockHashes, List<List<Object>> extraKeys) {
        /** The hashes as events carry them: the low 64 bits, unsigned; an integer of the chain as it is. */
        public List<BigInteger> external() {
            return blockHashes.stream().map(BlockHasher::external).toList();
        }
    }

    /**
     * Hashes every full block of a whole prompt. Token ids are unsigned 64-bit values. Throws {@link KvHashException}
     * when an item reaches past the prompt, rows are missing, or the release hashes a part of the adapter that is null.
     */
    public Chain chain(long[] tokens, RequestKeys keys) {
        keys.checkAgainst(tokens.length);
        keys.loraKeys(contract);
        List<Object> hashes = new ArrayList<>();
        List<List<Object>> hashedKeys = new ArrayList<>();
        Object parent = noneHash;
        for (long start = 0; start + span + lookahead <= tokens.length; start += span) {
            long end = start + span;
            List<Object> extra = keys.block(contract, start, end + lookahead);
            if (lookahead > 0) {
                List<Object> slot = new ArrayList<>();
                slot.add(extra);
                slot.addAll(integers(tokens, (int) end, (int) end + lookahead));
                extra = slot;
            }
            parent = hash(Arrays.asList(parent, integers(tokens, (int) start, (int) end), extra));
            hashes.add(parent);
            hashedKeys.add(extra);
        }
        return new Chain(Collections.unmodifiableList(hashes), Collections.unmodifiableList(hashedKeys));
    }

    private static List<Object> integers(long[] tokens, int start, int end) {
        List<Object> values = new ArrayList<>(end - start);
        for (int i = start; i < end; i++) {
            values.add(tokens[i] >= 0 ? (Object) tokens[i] : unsigned(tokens[i]));
        }
        return values;
    }

    private Object hash(Object preimage) {
        byte[] data = algorithm.pickle() ? Pickle5.encode(preimage) : Cbor.encode(preimage);
        byte[] digest = algorithm.sha256() ? Digests.sha256(data) : Digests.xxh3(data);
        if (!contract.chainValuesAreInts()) {
            return digest;
        }
        return algorithm.keepsLow64() ? low64(digest) : new BigInteger(1, digest);
    }

    private static BigInteger external(Object value) {
        return value instanceof BigInteger number ? number : low64((byte[]) value);
    }

    private static BigInteger low64(byte[] digest) {
        return new BigInteger(1, Arrays.copyOfRange(digest, digest.length - 8, digest.length));
    }

    private static BigInteger unsigned(long value) {
        return new BigInteger(Long.toUnsignedString(value));
    }
}
