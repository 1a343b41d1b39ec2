"""Tests of `kvhash.events`."""
