"""The test-vector corpus: reading it, checking it, making it, and checking other programs against it."""

from .load import Corpus, CorpusError, VectorFile, corpus_root, load_corpus

__all__ = ["Corpus", "CorpusError", "VectorFile", "corpus_root", "load_corpus"]
