"""KV events."""
