package kvhash;

import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.List;

/**
 * Canonical CBOR (RFC 8949 section 4.2.1) of a preimage: every head as short as it can be.
 *
 * <p>A preimage holds null, {@code Long}, {@code BigInteger}, {@code String}, {@code byte[]}, {@link Ref} and lists of
 * these, and nothing else.
 */
final class Cbor {
    private static final int UINT = 0x00;
    private static final int NINT = 0x20;
    private static final int BYTES = 0x40;
    private static final int TEXT = 0x60;
    private static final int ARRAY = 0x80;
    private static final int TAG = 0xc0;
    private static final int NULL = 0xf6;

    private Cbor() {}

    /** Serializes a value as {@code cbor2.dumps(value, canonical=True)} does. */
    static byte[] encode(Object value) {
        ByteWriter out = new ByteWriter();
        write(out, value);
        return out.toByteArray();
    }

    private static void write(ByteWriter out, Object value) {
        if (value == null) {
            out.write(NULL);
        } else if (value instanceof Long number) {
            head(out, number >= 0 ? UINT : NINT, number >= 0 ? number : -1 - number);
        } else if (value instanceof BigInteger number) {
            writeBig(out, number);
        } else if (value instanceof Ref ref) {
            write(out, ref.text());
        } else if (value instanceof String text) {
            payload(out, TEXT, text.getBytes(StandardCharsets.UTF_8));
        } else if (value instanceof byte[] bytes) {
            payload(out, BYTES, bytes);
        } else if (value instanceof List<?> items) {
            head(out, ARRAY, items.size());
            for (Object item : items) {
                write(out, item);
            }
        } else {
            throw new IllegalArgumentException("a preimage holds no " + value.getClass());
        }
    }

    private static void writeBig(ByteWriter out, BigInteger number) {
        boolean negative = number.signum() < 0;
        BigInteger magnitude = negative ? number.not() : number;
        if (magnitude.bitLength() <= 64) {
            head(out, negative ? NINT : UINT, magnitude.longValue());
            return;
        }
        byte[] signed = magnitude.toByteArray();
        int skipped = signed[0] == 0 ? 1 : 0;
        head(out, TAG, negative ? 3 : 2);
        head(out, BYTES, signed.length - skipped);
        out.write(signed, skipped, signed.length - skipped);
    }

    private static void payload(ByteWriter out, int major, byte[] bytes) {
        head(out, major, bytes.length);
        out.put(bytes);
    }

    /** Writes the shortest head; {@code argument} is unsigned. */
    private static void head(ByteWriter out, int major, long argument) {
        if (Long.compareUnsigned(argument, 24) < 0) {
            out.write(major | (int) argument);
        } else if (Long.compareUnsigned(argument, 0x100) < 0) {
            out.write(major | 24);
            out.big(argument, 1);
        } else if (Long.compareUnsigned(argument, 0x10000) < 0) {
            out.write(major | 25);
            out.big(argument, 2);
        } else if (Long.compareUnsigned(argument, 0x100000000L) < 0) {
            out.write(major | 26);
            out.big(argument, 4);
        } else {
            out.write(major | 27);
            out.big(argument, 8);
        }
    }
}
