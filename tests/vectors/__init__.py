"""The corpus, its generator and the conformance runner."""
