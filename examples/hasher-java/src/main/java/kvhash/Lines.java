package kvhash;

import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;

/** The request-line program: answers lines from standard input on standard output, in order, one for one. */
public final class Lines {
    private Lines() {}

    /** Takes no arguments. Ends when the input does, or quietly when nobody reads the output any more. */
    public static void main(String[] args) throws IOException {
        InputStream in = new BufferedInputStream(System.in, 1 << 16);
        try (OutputStream out = new FileOutputStream(FileDescriptor.out)) {
            for (byte[] line = next(in); line != null; line = next(in)) {
                String answer = RequestLine.answer(line);
                if (answer != null && !print(out, answer)) {
                    return;
                }
            }
        }
    }

    private static boolean print(OutputStream out, String answer) {
        try {
            out.write((answer + "\n").getBytes(StandardCharsets.UTF_8));
            return true;
        } catch (IOException error) {
            return false;
        }
    }

    /** Returns the next line with its end, or null; of one that is too long only the first bytes. */
    private static byte[] next(InputStream in) throws IOException {
        ByteArrayOutputStream line = new ByteArrayOutputStream();
        for (int b = in.read(); b >= 0; b = in.read()) {
            if (line.size() < RequestLine.MAX_BYTES + 2) {
                line.write(b);
            }
            if (b == '\n') {
                return line.toByteArray();
            }
        }
        return line.size() > 0 ? line.toByteArray() : null;
    }
}
