"""Tests that hold several languages or processes to one promise."""
