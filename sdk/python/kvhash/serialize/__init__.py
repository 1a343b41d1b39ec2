"""The two serializations that vLLM hashes: canonical CBOR, and pickle protocol 5 as CPython writes it.

Both write the same small set of values (`Value`) and nothing else, since a block hash preimage holds nothing else:
None, integers, text, bytes, and tuples of these.
"""

from ._values import Ref, Value
from .cbor import encode_cbor
from .pickle5 import encode_pickle5

__all__ = ["Ref", "Value", "encode_cbor", "encode_pickle5"]
