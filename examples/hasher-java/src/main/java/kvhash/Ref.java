package kvhash;

/**
 * One text that may stand in several places of one preimage.
 *
 * <p>Pickle writes an object that it has met before as a back-reference, so it matters whether two equal texts are the
 * same object. A {@code String} or {@code byte[]} in a preimage counts as a fresh object at every place; a {@code Ref}
 * is one object wherever that same instance stands. CBOR has no identity; there it is its text.
 */
final class Ref {
    private final String text;

    Ref(String text) {
        this.text = text;
    }

    String text() {
        return text;
    }
}
