package kvhash;

import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Map;

/**
 * Pickle protocol 5, byte for byte as CPython's C pickler writes a preimage.
 *
 * <p>Three rules make the bytes what they are. Memo: text, bytes and non-empty tuples are numbered in the order in
 * which they are finished; an object (not an equal value) met again is a back-reference. Integers and null are never
 * numbered; the empty text and the empty bytes are one object each. Frames: before each value an open frame of 64 KiB
 * or more is closed; a frame of fewer than 4 bytes has no header. Large payloads: text or bytes of 64 KiB or more stand
 * outside any frame.
 */
final class Pickle5 {
    private static final int FRAME_SIZE_TARGET = 64 * 1024;
    private static final int FRAME_SIZE_MIN = 4;
    private static final int MEMOIZE = 0x94;
    private static final int[] SHORT_TUPLES = {')', 0x85, 0x86, 0x87};
    private static final Object EMPTY_TEXT = new Object();
    private static final Object EMPTY_BYTES = new Object();

    private final ByteWriter out = new ByteWriter();
    private ByteWriter frame;
    private final Map<Object, Integer> memo = new IdentityHashMap<>();
    private int numbered;

    private Pickle5() {}

    /** Serializes a value as {@code pickle.dumps(value, protocol=5)} does, with identities as {@link Ref} says. */
    static byte[] encode(Object value) {
        Pickle5 writer = new Pickle5();
        writer.out.write(0x80);
        writer.out.write(5);
        writer.save(value);
        writer.open().write('.');
        writer.closeFrame();
        return writer.out.toByteArray();
    }

    private void save(Object value) {
        if (frame != null && frame.size() >= FRAME_SIZE_TARGET) {
            closeFrame();
        }
        if (value == null) {
            open().write('N');
        } else if (value instanceof Long number) {
            saveLong(number);
        } else if (value instanceof BigInteger number) {
            if (number.bitLength() <= 63) {
                saveLong(number.longValue());
            } else {
                saveBig(number);
            }
        } else if (value instanceof List<?> items) {
            saveTuple(items);
        } else if (value instanceof Ref ref) {
            saveObject(ref, ref.text());
        } else {
            saveObject(null, value);
        }
    }

    private void saveLong(long number) {
        ByteWriter to = open();
        if (number >= 0 && number < 0x100) {
            to.write('K');
            to.little(number, 1);
        } else if (number >= 0 && number < 0x10000) {
            to.write('M');
            to.little(number, 2);
        } else if (number == (int) number) {
            to.write('J');
            to.little(number, 4);
        } else {
            saveBig(BigInteger.valueOf(number));
        }
    }

    /** Writes LONG1 or LONG4: little-endian two's complement in the fewest bytes that keep the sign. */
    private void saveBig(BigInteger number) {
        byte[] bigEndian = number.toByteArray();
        ByteWriter to = open();
        if (bigEndian.length < 0x100) {
            to.write(0x8a);
            to.little(bigEndian.length, 1);
        } else {
            to.write(0x8b);
            to.little(bigEndian.length, 4);
        }
        for (int i = bigEndian.length - 1; i >= 0; i--) {
            to.write(bigEndian[i]);
        }
    }

    private void saveTuple(List<?> items) {
        if (items.isEmpty()) {
            open().write(SHORT_TUPLES[0]);
            return;
        }
        boolean isShort = items.size() < SHORT_TUPLES.length;
        if (!isShort) {
            open().write('(');
        }
        for (Object item : items) {
            save(item);
        }
        open().write(isShort ? SHORT_TUPLES[items.size()] : 't');
        memoize(null);
    }

    private void saveObject(Ref ref, Object content) {
        boolean isText = content instanceof String;
        byte[] payload = isText ? ((String) content).getBytes(StandardCharsets.UTF_8) : (byte[]) content;
        Object identity = payload.length > 0 ? ref : isText ? EMPTY_TEXT : EMPTY_BYTES;
        Integer number = identity == null ? null : memo.get(identity);
        if (number != null) {
            open().write(number < 0x100 ? 'h' : 'j');
            open().little(number, number < 0x100 ? 1 : 4);
            return;
        }
        if (payload.length >= FRAME_SIZE_TARGET) {
            closeFrame();
        }
        ByteWriter to = payload.length >= FRAME_SIZE_TARGET ? out : open();
        if (payload.length < 0x100) {
            to.write(isText ? 0x8c : 'C');
            to.little(payload.length, 1);
        } else {
            to.write(isText ? 'X' : 'B');
            to.little(payload.length, 4);
        }
        to.put(payload);
        memoize(identity);
    }

    private void memoize(Object identity) {
        if (identity != null) {
            memo.put(identity, numbered);
        }
        numbered++;
        open().write(MEMOIZE);
    }

    private ByteWriter open() {
        if (frame == null) {
            frame = new ByteWriter();
        }
        return frame;
    }

    private void closeFrame() {
        if (frame == null) {
            return;
        }
        if (frame.size() >= FRAME_SIZE_MIN) {
            out.write(0x95);
            out.little(frame.size(), 8);
        }
        out.put(frame.toByteArray());
        frame = null;
    }
}
