"""Tests of the residency index."""
