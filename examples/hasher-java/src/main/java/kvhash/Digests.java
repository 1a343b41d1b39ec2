package kvhash;

import com.dynatrace.hash4j.hashing.HashValue128;
import com.dynatrace.hash4j.hashing.Hasher128;
import com.dynatrace.hash4j.hashing.Hashing;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;

/** The digests, most significant byte first. */
final class Digests {
    private static final Hasher128 XXH3 = Hashing.xxh3_128();

    private Digests() {}

    /** Returns the SHA-256 digest, 32 bytes. */
    static byte[] sha256(byte[] data) {
        try {
            return MessageDigest.getInstance("SHA-256").digest(data);
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException("every Java has SHA-256", error);
        }
    }

    /** Returns the XXH3 128-bit digest, seed 0, 16 bytes. */
    static byte[] xxh3(byte[] data) {
        HashValue128 value = XXH3.hashBytesTo128Bits(data);
        return ByteBuffer.allocate(16)
                .putLong(value.getMostSignificantBits())
                .putLong(value.getLeastSignificantBits())
                .array();
    }
}
