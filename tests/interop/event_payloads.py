"""Random payloads for decoders: batches of every shape, with anything in any place, in every width of msgpack."""

from __future__ import annotations

import random
import struct

__all__ = ["random_payloads"]

_NAMES = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
    "cache_salt",
)
_TAGS = ("BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Later")
_WORDS = ("GPU", "CPU", "", "é", "\U0001f600", "a'b", 'a"b\n', "1", "None", "1.0", "x" * 40, "type", "extra")


class _Maker:
    """Writes msgpack at random; `wild` is how often something else stands where a field is due."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wild = 0.0

    def head(self, count: int, short: int, limit: int, wide: tuple[int, ...]) -> bytes:
        if count <= limit and self.rng.random() < 0.9:
            return bytes([short | count])
        first = self.rng.choice(wide)
        width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
        return bytes([first]) + (count % (1 << 8 * width[first])).to_bytes(width[first], "big")

    def text(self, value: str | None = None) -> bytes:
        data = (self.rng.choice(_WORDS) if value is None else value).encode()
        if self.rng.random() < 0.003:
            data = b"\xff\xc0"
        wide = (0xD9, 0xDA, 0xDB)
        return self.head(len(data), 0xA0, 31, wide) + data

    def integer(self) -> bytes:
        rng = self.rng
        kind = rng.randrange(10)
        if kind < 3:
            return bytes([rng.choice((rng.randrange(128), rng.randrange(0xE0, 0x100)))])
        width = rng.randrange(4)
        first = (0xCC if kind < 8 else 0xD0) + width
        return bytes([first]) + rng.choice(
            (rng.randbytes(1 << width), bytes(1 << width), b"\xff" * (1 << width))
        )

    def token(self) -> bytes:
        value = self.rng.randrange(152_000)
        return bytes([value]) if value < 128 else b"\xce" + value.to_bytes(4, "big")

    def bytes_(self, length: int | None = None) -> bytes:
        size = self.rng.choice((0, 7, 8, 16, 32, 64, 65)) if length is None else length
        return self.head(size, 0, -1, (0xC4, 0xC5, 0xC6)) + self.rng.randbytes(size)

    def extension(self) -> bytes:
        rng = self.rng
        code = rng.choice((0xFF, 0xFF, 5, 0))
        seconds = rng.choice((0, 5, 1 << 33, -1, 253402300800, -62135596801)) & ((1 << 64) - 1)
        nano = rng.choice((0, 1000, 1_500, 999_999_999, 1 << 31))
        bodies = (
            b"\xd6" + bytes([code]) + struct.pack(">I", seconds & 0xFFFFFFFF),
            b"\xd7"
            + bytes([code])
            + struct.pack(">Q", (nano << 34 | seconds & 0x3FFFFFFFF) & ((1 << 64) - 1)),
            b"\xc7\x0c" + bytes([code]) + struct.pack(">IQ", nano, seconds),
            b"\xd4" + bytes([code]) + b"a",
            b"\xc8\x00\x03" + bytes([code]) + b"abc",
        )
        return rng.choice(bodies)

    def array(self, items: list[bytes]) -> bytes:
        return self.head(len(items), 0x90, 15, (0xDC, 0xDD)) + b"".join(items)

    def map(self, pairs: list[tuple[bytes, bytes]]) -> bytes:
        return self.head(len(pairs), 0x80, 15, (0xDE, 0xDF)) + b"".join(k + v for k, v in pairs)

    def value(self, depth: int = 0, *, key: bool = False) -> bytes:
        """Return any value; of extension values only a few can be keys, and their names differ by program."""
        rng = self.rng
        kind = rng.randrange(12 if depth < 3 else 8)
        if kind == 0:
            return rng.choice((b"\xc0", b"\xc2", b"\xc3"))
        if kind == 1:
            number = rng.choice((0.0, 1.0, -0.0, 1.5, 1e22, 1e-7, float("inf"), float("nan"), rng.random()))
            return b"\xcb" + struct.pack(">d", number) if rng.random() < 0.7 else b"\xca" + rng.randbytes(4)
        if kind in (2, 3):
            return self.integer()
        if kind == 4:
            return self.bytes_()
        if kind == 5 and not key and rng.random() < 0.3:
            return self.extension()
        if kind < 8:
            return self.text()
        if kind < 10 or (key and rng.random() < 0.9):
            return self.array([self.value(depth + 1, key=key) for _ in range(rng.randrange(4))])
        if rng.random() < 0.01:
            return b"\x91" * 3000 + b"\xc0"
        pairs = []
        for _ in range(rng.randrange(4)):
            name = self.text() if rng.random() < 0.6 else self.value(depth + 1, key=True)
            pairs.append((name, self.value(depth + 1)))
        return self.map(pairs)

    def hash(self, form: int) -> bytes:
        return self.integer() if form < 2 else self.bytes_(self.rng.choice((8, 16, 32)))

    def field(self, name: str, form: int) -> bytes:
        rng = self.rng
        if rng.random() < self.wild:
            return self.value()
        if name == "block_hashes":
            return self.array([self.hash(form) for _ in range(rng.choice((0, 1, 2, 2, 3, 20)))])
        if name == "parent_block_hash":
            return b"\xc0" if rng.random() < 0.4 else self.hash(form)
        if name == "token_ids":
            count = rng.choice((0, 2, 4, 16, 32))
            if rng.random() < 0.1:
                return self.array([self.array([self.token(), self.integer()]) for _ in range(count)])
            return self.array([self.token() for _ in range(count)])
        if name == "block_size":
            return rng.choice((b"\x02", b"\x10", b"\x00", b"\xcc\x80", b"\xcf" + b"\xff" * 8, b"\xff"))
        if name in ("lora_id", "group_idx", "kv_cache_spec_sliding_window"):
            return b"\xc0" if rng.random() < 0.5 else self.integer()
        if name == "extra_keys":
            if rng.random() < 0.3:
                return b"\xc0"
            keys = [b"\xc0", b"\x90", self.array([self.value() for _ in range(rng.randrange(3))])]
            return self.array([rng.choice(keys) for _ in range(rng.randrange(4))])
        if name == "lookahead_token_ids":
            if rng.random() < 0.3:
                return b"\xc0"
            return self.array(
                [self.array([self.token() for _ in range(rng.randrange(3))]) for _ in range(rng.randrange(3))]
            )
        return b"\xc0" if rng.random() < 0.5 else self.text()

    def event(self) -> bytes:
        rng = self.rng
        self.wild = rng.choice((0.0, 0.0, 0.0, 0.03, 0.2))
        if rng.random() < 0.03:
            return self.value()
        tag, form = rng.choice(_TAGS), rng.randrange(3)
        names = (
            _NAMES
            if tag == "BlockStored"
            else ("block_hashes", "medium", "group_idx", "locality", "ownership")
        )
        if rng.random() < 0.4:
            count = rng.randrange(4, len(_NAMES)) if tag == "BlockStored" else rng.randrange(1, 6)
            items = [self.text(tag), *[self.field(name, form) for name in names[: min(count, 15)]]]
            if rng.random() < 0.1:
                items += [self.value() for _ in range(rng.randrange(3))]
            if rng.random() < 0.15 and len(items) > 7:
                items[7] = self.map([(self._name(), self.field(rng.choice(_NAMES), form)) for _ in range(3)])
            return self.array(items if tag != "AllBlocksCleared" or rng.random() < 0.2 else items[:1])
        pairs = [(self.text(name), self.field(name, form)) for name in names if rng.random() < 0.93]
        if tag == "AllBlocksCleared" and rng.random() < 0.8:
            pairs = []
        pairs.insert(
            0 if rng.random() < 0.9 else rng.randrange(len(pairs) + 1), (self.text("type"), self.text(tag))
        )
        while rng.random() < 0.15:
            pairs.insert(rng.randrange(len(pairs) + 1), (self._name(), self.value()))
        return self.map(pairs)

    def _name(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.1:
            return self.value(2, key=True)
        return self.text(rng.choice((*_NAMES, *_WORDS)))

    def batch(self) -> bytes:
        rng = self.rng
        events = self.array([self.event() for _ in range(rng.choice((0, 1, 1, 2, 3, 17)))])
        ts = b"\xcb" + struct.pack(">d", 1.7e9 + rng.random()) if rng.random() < 0.9 else self.value()
        rank = rng.choice(
            (b"\xc0", b"\x00", b"\x03", self.integer()) if rng.random() < 0.95 else (self.value(),)
        )
        if rng.random() < 0.05:
            events = self.value()
        if rng.random() < 0.85:
            tail = [rank] if rng.random() < 0.9 else [rank, self.value()][: rng.randrange(3)]
            return self.array([ts, events, *tail])
        pairs = [(self.text("ts"), ts), (self.text("events"), events)]
        pairs.append((self.text(rng.choice(("data_parallel_rank", "attn_dp_rank"))), rank))
        while rng.random() < 0.3:
            pairs.append((self._name() if rng.random() < 0.3 else self.text(), self.value()))
        rng.shuffle(pairs)
        return self.map(pairs)


def random_payloads(count: int, seed: int) -> list[bytes]:
    """Return random batches; of some a part is cut off, changed or put in twice."""
    maker = _Maker(seed)
    rng = maker.rng
    payloads = []
    for _ in range(count):
        data = bytearray(maker.batch())
        if data and rng.random() < 0.2:
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    del data[place:]
                case 1:
                    data[place] = rng.randrange(256)
                case 2:
                    data[place:place] = data[place : place + rng.randrange(1, 9)]
                case _:
                    data += b"\x00"
        payloads.append(bytes(data))
    return payloads
