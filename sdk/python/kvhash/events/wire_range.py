"""Which vLLM releases write events as the ones that were seen: a range narrowed by every event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvhash.contract import CHANGES, OLDEST, EventContract, Release

__all__ = ["ReleaseRange", "WireRange"]

#: First release of a range, and the release before which it ends; None where it is open.
ReleaseRange = tuple[Release, "Release | None"]


def _shapes() -> list[tuple[Release, Release | None, EventContract]]:
    """Return each distinct way of writing events with the releases [first, before) that write so."""
    from kvhash.contract import Contract

    starts: list[tuple[Release, EventContract]] = []
    for change in CHANGES:
        events = Contract.events_for_vllm(change.since)
        if not starts or starts[-1][1] != events:
            starts.append((change.since, events))
    ends: list[Release | None] = [since for since, _ in starts[1:]]
    return [(since, end, events) for (since, events), end in zip(starts, [*ends, None], strict=True)]


class WireRange:
    """Narrows the releases down as payloads are seen; holds nothing but the candidates."""

    def __init__(self) -> None:
        self._candidates = _shapes()
        self.foreign_fields: set[str] = set()

    def see(self, payload: bytes) -> None:
        """Take one payload into account; one that is no batch is passed over."""
        try:
            batch = msgspec.msgpack.decode(payload)
            events = batch[1] if isinstance(batch, list) else []
        except (msgspec.MsgspecError, ValueError, RecursionError, IndexError):
            return
        for event in events if isinstance(events, list) else ():
            self._see_event(event)

    def _see_event(self, event: Any) -> None:
        if isinstance(event, list) and event and isinstance(event[0], str):
            tag, count = event[0], len(event) - 1
            kept = [
                shape
                for shape in self._candidates
                if shape[2].layout == "array" and count == len(shape[2].fields(tag))
            ]
        elif isinstance(event, dict) and isinstance(event.get("type"), str):
            names = set(event) - {"type"}
            kept = [
                shape
                for shape in self._candidates
                if shape[2].layout == "map" and self._fits(shape[2], event["type"], names)
            ]
            if not kept:
                newest = self._candidates[-1][2] if self._candidates else None
                if newest is not None:
                    self.foreign_fields |= names - {field.name for field in newest.fields(event["type"])}
        else:
            return
        self._candidates = kept

    @staticmethod
    def _fits(contract: EventContract, tag: str, names: set[str]) -> bool:
        fields = contract.fields(tag)
        return names <= {f.name for f in fields} and {f.name for f in fields if not f.optional} <= names

    @property
    def ranges(self) -> tuple[ReleaseRange, ...]:
        """The releases that remain, neighbours joined; none when no release writes what was seen."""
        merged: list[ReleaseRange] = []
        for first, before, _ in self._candidates:
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], before)
            else:
                merged.append((first, before))
        return tuple(merged)

    @property
    def text(self) -> str:
        """The releases that remain, in words."""
        if not self._candidates:
            return "no vLLM release"
        return ", ".join(
            f"{self._from(first)} and later"
            if before is None
            else f"{self._from(first)} up to before {before}"
            for first, before in self.ranges
        )

    @staticmethod
    def _from(first: Release) -> str:
        return f"{first} or older" if first == OLDEST else str(first)


def release_range(payloads: Iterable[bytes]) -> WireRange:
    """Return the range after all of `payloads`."""
    seen = WireRange()
    for payload in payloads:
        seen.see(payload)
    return seen
