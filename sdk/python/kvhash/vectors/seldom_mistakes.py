"""Known mistakes that show only where two features meet, beyond the usual sizes, or in texts of unusual form."""

from __future__ import annotations

import posixpath
import unicodedata
from typing import Any

from .mistake import Mistake

__all__ = ["SeldomMistake"]


class SeldomMistake(Mistake):
    """Base of the mistakes that are tried on the vectors made for them alone."""

    seldom = True


# --- numbers


class TokensThroughDouble(SeldomMistake):
    """Mistake `tokens-rounded-to-double`."""

    name = "tokens-rounded-to-double"
    said = "passes token ids through a double, which keeps 53 bits"
    cost = "misses for token ids above 2^53"

    def read_tokens(self, tokens: list[int]) -> list[int]:
        return [int(float(token)) for token in tokens]


class LookaheadThrough32Bits(SeldomMistake):
    """Mistake `lookahead-ids-through-32-bits`."""

    name = "lookahead-ids-through-32-bits"
    shows_in = ("lookahead",)
    said = "keeps 32 bits of a look-ahead token id; ids up to 2^64 - 1 are hashed"
    cost = "misses for token ids of 2^32 and more"

    def following(self, tokens: list[int]) -> list[int]:
        return [token % (1 << 32) for token in tokens]


class LookaheadThroughDouble(SeldomMistake):
    """Mistake `lookahead-ids-rounded-to-double`."""

    name = "lookahead-ids-rounded-to-double"
    shows_in = ("lookahead",)
    said = "passes look-ahead token ids through a double, which keeps 53 bits"
    cost = "misses for token ids above 2^53"

    def following(self, tokens: list[int]) -> list[int]:
        return [min(int(float(token)), (1 << 64) - 1) for token in tokens]


class LoraIdThrough32Bits(SeldomMistake):
    """Mistake `lora-id-through-32-bits`."""

    name = "lora-id-through-32-bits"
    shows_in = ("lora",)
    said = "keeps 32 bits of an adapter's id; before 0.11.1 ids up to 2^63 - 1 are hashed"
    cost = "misses for adapter ids of 2^32 and more"

    def lora_keys(self) -> list[Any]:
        return [key % (1 << 32) if isinstance(key, int) else key for key in super().lora_keys()]


class OffsetIn8Bits(SeldomMistake):
    """Mistake `mm-offset-clamped-to-8-bits`."""

    name = "mm-offset-clamped-to-8-bits"
    shows_in = ("multimodal",)
    said = "keeps an image's offset within -256 and 255"
    cost = "misses where an image starts far into a block or began far before it"
    least, most = -256, 255

    def offset(self, item: dict[str, Any], start: int) -> int:
        return min(max(super().offset(item, start), self.least), self.most)


class OffsetIn16Bits(OffsetIn8Bits):
    """Mistake `mm-offset-clamped-to-16-bits`."""

    name = "mm-offset-clamped-to-16-bits"
    said = "keeps an image's offset within -65536 and 65535"
    least, most = -65536, 65535


# --- how many


class KeysCutAt4(SeldomMistake):
    """Mistake `mm-cut-at-4`."""

    name = "mm-cut-at-4"
    shows_in = ("multimodal",)
    said = "keeps 4 images of a block; all that overlap it count"
    cost = "blocks with other images are taken for each other: false hits"
    kept = 4

    def multimodal_keys(self, start: int, end: int) -> list[Any]:
        return super().multimodal_keys(start, end)[: self.kept]


class KeysCutAt8(KeysCutAt4):
    """Mistake `mm-cut-at-8`."""

    name = "mm-cut-at-8"
    said = "keeps 8 images of a block; all that overlap it count"
    kept = 8


class KeysCutAt255(KeysCutAt4):
    """Mistake `mm-cut-at-255`."""

    name = "mm-cut-at-255"
    said = "keeps 255 images of a block; all that overlap it count"
    kept = 255


class EqualImagesDropped(SeldomMistake):
    """Mistake `mm-equal-images-once`."""

    name = "mm-equal-images-once"
    shows_in = ("multimodal",)
    said = "counts an image once in a block where it stands twice; each place is a key of its own"
    cost = "misses where one image stands twice in a block"

    def multimodal_keys(self, start: int, end: int) -> list[Any]:
        items = self.request.get("multimodal") or []
        request = self.request
        first: dict[str, Any] = {}
        for item in items:
            if self.overlaps(item, start, end):
                first.setdefault(item["identifier"], item)
        self.request = {**request, "multimodal": list(first.values())}
        try:
            return super().multimodal_keys(start, end)
        finally:
            self.request = request


# --- two features together


class _Parallel(SeldomMistake):
    """What goes wrong under context parallelism only."""

    @property
    def ranks(self) -> int:
        """The context-parallel ranks."""
        return self.context_parallel()

    @property
    def inner(self) -> int:
        """The tokens of a block of one rank."""
        return self.span // self.ranks


class SaltDroppedInParallel(_Parallel):
    """Mistake `salt-dropped-under-context-parallel`."""

    name = "salt-dropped-under-context-parallel"
    shows_in = ("cache_salt",)
    said = "leaves the salt out under context parallelism"
    cost = "one tenant's blocks are taken for another's"

    def salted(self, start: int) -> bool:
        return super().salted(start) and self.ranks == 1


class LoraDroppedInParallel(_Parallel):
    """Mistake `lora-dropped-under-context-parallel`."""

    name = "lora-dropped-under-context-parallel"
    shows_in = ("lora",)
    said = "leaves the adapter out under context parallelism"
    cost = "an adapter's blocks are taken for the base model's: wrong answers"

    def lora_keys(self) -> list[Any]:
        return super().lora_keys() if self.ranks == 1 else []


class LookaheadCutInParallel(_Parallel):
    """Mistake `lookahead-one-under-context-parallel`."""

    name = "lookahead-one-under-context-parallel"
    shows_in = ("lookahead",)
    said = "takes one look-ahead token under context parallelism; right are all"

    def following(self, tokens: list[int]) -> list[int]:
        return tokens if self.ranks == 1 else tokens[:1]


class OffsetFromInnerBlock(_Parallel):
    """Mistake `mm-offset-from-inner-block`."""

    name = "mm-offset-from-inner-block"
    shows_in = ("multimodal",)
    said = "counts an image's offset from block i of one rank; under context parallelism it is from what hash i covers"

    def offset(self, item: dict[str, Any], start: int) -> int:
        return super().offset(item, start // self.ranks)


class EmbedsByInnerBlock(_Parallel):
    """Mistake `embeds-by-inner-block`."""

    name = "embeds-by-inner-block"
    shows_in = ("prompt_embeds",)
    said = (
        "takes the rows of one rank's block; under context parallelism those of all tokens of the hash count"
    )
    cost = "blocks of other embeddings are taken for each other: false hits"

    def rows(self, start: int, end: int) -> bytes:
        return super().rows(start, min(end, start + self.inner + self.lookahead))


class EmbedsLookaheadOneRow(SeldomMistake):
    """Mistake `embeds-lookahead-one-row`."""

    name = "embeds-lookahead-one-row"
    shows_in = ("lookahead",)
    said = "takes the rows of the block and one more; with look-ahead the rows of all look-ahead tokens count"

    def rows(self, start: int, end: int) -> bytes:
        return super().rows(start, start + self.span + min(self.lookahead, 1))


class EmbedsLastTakesRest(SeldomMistake):
    """Mistake `embeds-last-block-takes-rest`."""

    name = "embeds-last-block-takes-rest"
    shows_in = ("prompt_embeds",)
    said = "gives the last block all rows that are left; rows past its tokens do not count"

    def rows(self, start: int, end: int) -> bytes:
        return super().rows(start, end if end < len(self.tokens) else 1 << 60)


class LoraDroppedWithLookahead(SeldomMistake):
    """Mistake `lora-dropped-with-lookahead`."""

    name = "lora-dropped-with-lookahead"
    shows_in = ("lora",)
    said = "leaves the adapter out where there is look-ahead"
    cost = "an adapter's blocks are taken for the base model's: wrong answers"

    def lora_keys(self) -> list[Any]:
        return [] if self.lookahead else super().lora_keys()


class LookaheadCutAtBlock(SeldomMistake):
    """Mistake `lookahead-cut-at-next-block`."""

    name = "lookahead-cut-at-next-block"
    shows_in = ("lookahead",)
    said = "takes look-ahead tokens of the next block only; look-ahead may be longer than a block"

    def following(self, tokens: list[int]) -> list[int]:
        return tokens[: self.span]


# --- texts


class _TextMistake(SeldomMistake):
    """Base of the mistakes that change a text before it is written."""

    shows_in = ("lora", "cache_salt", "multimodal")

    def text(self, value: str) -> str:
        return super().text(self.changed(value))

    def changed(self, value: str) -> str:
        raise NotImplementedError


class TextsLowerCased(_TextMistake):
    """Mistake `texts-lower-cased`."""

    name = "texts-lower-cased"
    said = "writes salts, adapters or identifiers in lower case; texts are hashed as they are"
    cost = "misses for texts with capital letters, and false hits between those that differ in them only"

    def changed(self, value: str) -> str:
        return value.lower()


class TextsNormalized(_TextMistake):
    """Mistake `texts-normalized`."""

    name = "texts-normalized"
    said = "normalizes texts (NFC); they are hashed as they are"
    cost = "misses for texts that are not normalized"

    def changed(self, value: str) -> str:
        return unicodedata.normalize("NFC", value)


class TextsTrimmed(_TextMistake):
    """Mistake `texts-trimmed`."""

    name = "texts-trimmed"
    said = "trims white space around texts; they are hashed as they are"
    cost = "misses for such texts"

    def changed(self, value: str) -> str:
        return value.strip()


class TextsCutAtNul(_TextMistake):
    """Mistake `texts-cut-at-nul`."""

    name = "texts-cut-at-nul"
    said = "ends a text at its first NUL; the whole text is hashed"
    cost = "texts that differ behind a NUL are taken for each other"

    def changed(self, value: str) -> str:
        return value.split("\0")[0]


class TextsCutAt255(_TextMistake):
    """Mistake `texts-cut-at-255`."""

    name = "texts-cut-at-255"
    said = "keeps 255 characters of a text; the whole text is hashed"
    cost = "long texts with equal beginnings are taken for each other"
    kept = 255

    def changed(self, value: str) -> str:
        return value[: self.kept]


class TextsCutAt65535(TextsCutAt255):
    """Mistake `texts-cut-at-65535`."""

    name = "texts-cut-at-65535"
    said = "keeps 65535 characters of a text; the whole text is hashed"
    kept = 65535


class PathNormalized(SeldomMistake):
    """Mistake `lora-path-normalized`."""

    name = "lora-path-normalized"
    shows_in = ("lora",)
    said = "normalizes the adapter's path; from 0.31 it is hashed as it was given to vLLM"
    cost = "misses for adapters whose path has '.', '..' or '/' to spare"

    def lora_keys(self) -> list[Any]:
        return [
            (*key[:2], self.text(posixpath.normpath(key[2]))) if isinstance(key, tuple) else key
            for key in super().lora_keys()
        ]
