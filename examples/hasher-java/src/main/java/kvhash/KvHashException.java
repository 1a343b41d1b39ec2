package kvhash;

/**
 * What went wrong, and where. The code is stable and the same as in every other kvhash program; messages may change.
 */
public final class KvHashException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final String code;

    /** {@code at} is the place in the request ({@code $.multimodal[1].offset}), null where there is none. */
    public KvHashException(String code, String message, String at) {
        super(at == null ? message : message + " - at " + at);
        this.code = code;
    }

    /** The stable name of the fault. */
    public String code() {
        return code;
    }
}
