"""Collects request vectors: for each request the ranges of releases that give one answer, confirmed twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvhash import KvHashError, answer, parse_request
from kvhash.contract import Release

from .inputs import expand
from .mistakes import MISTAKES, wrong_values
from .plain import PlainHasher
from .record import vector
from .releases import OLDEST_TEXT, Range, ranges

__all__ = ["GENERAL_CODE", "RequestMaker", "Vectors", "request_answer"]

Vectors = dict[str, list[dict[str, Any]]]

#: What a program may say for any field that is wrong.
GENERAL_CODE = "invalid-request"
#: Preimages longer than this are left out: the digest says as much.
_MAX_SERIALIZED = 600


def request_answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program is to answer, ``{"error": {"codes": [...]}}`` where it is to refuse."""
    try:
        return answer(parse_request(expand(dict(request))))
    except KvHashError as error:
        codes = {error.code, GENERAL_CODE} if error.code.startswith("invalid-") else {error.code}
        return {"error": {"codes": sorted(codes)}}


class RequestMaker:
    """Collects request vectors by kind, each confirmed by the independent hasher."""

    def __init__(self, real: Iterable[Release], wrong_per_vector: int = 3, most_wrong: int = 6) -> None:
        self.real = sorted(real)
        self.made: Vectors = {}
        self._shown: dict[str, int] = {}
        self._wrong_per_vector = wrong_per_vector
        self._most_wrong = most_wrong

    def add(
        self,
        kind: str,
        slug: str,
        name: str,
        request: Mapping[str, Any],
        flags: Iterable[str],
        *,
        first: str = OLDEST_TEXT,
        last: str | None = None,
        all_wrong: bool = False,
        shows: Sequence[str] = (),
    ) -> None:
        """Add one vector for each range of releases that gives `request` one answer.

        `shows`: the seldom mistakes that the vector was made for; they stand first among its wrong values.
        """
        for found in ranges(
            lambda release: request_answer({**request, "vllm": release}), Release.parse(first)
        ):
            if last is not None and found.since >= Release.parse(last):
                continue
            until = found.until
            if last is not None and (until is None or until > Release.parse(last)):
                until = Release.parse(last)
            self._add_one(
                kind, slug, name, request, flags, Range(found.since, until, found.answer), all_wrong, shows
            )

    def _add_one(
        self,
        kind: str,
        slug: str,
        name: str,
        request: Mapping[str, Any],
        flags: Iterable[str],
        found: Range,
        all_wrong: bool,
        shows: Sequence[str],
    ) -> None:
        right = None if "error" in found.answer else found.answer
        asked = expand({**request, "vllm": str(found.since)})
        known_root = right is not None or "unknown-root" in found.answer["error"]["codes"]
        wrong = self._wrong(asked, right, all_wrong, shows) if known_root else {}
        serialized = root = None
        if right is not None:
            plain = PlainHasher(asked)
            if plain.answer() != right:
                raise AssertionError(f"{slug}: the SDK and the independent hasher disagree")
            blocks = [plain.serialize(preimage) for preimage, _ in plain.preimages()]
            if sum(map(len, blocks)) <= _MAX_SERIALIZED:
                serialized = [block.hex() for block in blocks]
            root = plain.serialize(plain.seed_value()).hex()
            root = root if len(root) <= 2 * _MAX_SERIALIZED else None
        bounds = [] if found.since == Release.parse(OLDEST_TEXT) and found.until is None else ["boundary"]
        self.made.setdefault(kind, []).append(
            vector(
                f"{kind}/{slug}/{found.since}",
                name,
                flags=[*flags, *bounds],
                since=str(found.since),
                until=None if found.until is None else str(found.until),
                result="valid" if right else "invalid",
                input={"request": dict(request), "vllm": found.asked(self.real)},
                expected=found.answer,
                serialized=serialized,
                serialized_root=root,
                wrong=wrong or None,
            )
        )

    def _wrong(
        self, request: dict[str, Any], right: dict[str, Any] | None, more: bool, shows: Sequence[str]
    ) -> dict[str, str]:
        """Return some wrong values: those of `shows`, then of the mistakes that the fewest vectors show so far."""
        usual = [name for name, kind in MISTAKES.items() if not kind.seldom]
        order = [*shows, *sorted(usual, key=lambda name: (self._shown.get(name, 0), name))]
        most = max(len(shows), self._most_wrong if more else self._wrong_per_vector)
        wrong = wrong_values(request, right, order=order, most=most)
        for name in wrong:
            self._shown[name] = self._shown.get(name, 0) + 1
        return wrong
