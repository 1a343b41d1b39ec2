"""The tests, by layer."""
