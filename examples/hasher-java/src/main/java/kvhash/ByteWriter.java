package kvhash;

import java.io.ByteArrayOutputStream;

/** Bytes being written. */
final class ByteWriter extends ByteArrayOutputStream {
    ByteWriter() {
        super(256);
    }

    void put(byte[] bytes) {
        write(bytes, 0, bytes.length);
    }

    /** Writes the low {@code width} bytes of a value, most significant byte first. */
    void big(long value, int width) {
        for (int shift = 8 * (width - 1); shift >= 0; shift -= 8) {
            write((int) (value >>> shift));
        }
    }

    /** Writes the low {@code width} bytes of a value, least significant byte first. */
    void little(long value, int width) {
        for (int shift = 0; shift < 8 * width; shift += 8) {
            write((int) (value >>> shift));
        }
    }
}
