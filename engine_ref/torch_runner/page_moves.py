"""Pages to and from host memory: on CUDA through pinned memory and a stream of their own, beside the model's.

A write is begun and not waited for: the model's stream waits for it before the next step. A read waits for its own
copy only. On the CPU the same staging is plain memory, and there is one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "OneStream", "PageMover", "Streams"]

#: Pages on their way to the device at once; one more waits for the oldest.
_RING = 16


class Streams(Protocol):
    """The stream of the model and, beside it, the one of the moves."""

    def moving(self) -> AbstractContextManager[Any]:
        """Make what is done inside go to the moves' stream, after all that the model's has been given."""
        ...

    def mark(self) -> Any:
        """Return a mark of what the moves' stream has been given."""
        ...

    def wait(self, mark: Any) -> None:
        """Hold the host until a mark is reached."""
        ...

    def join(self) -> None:
        """Make the model's stream wait for all moves that were begun; the host does not wait."""
        ...


class OneStream:
    """A device that does one thing after the other, as it is told."""

    def moving(self) -> AbstractContextManager[Any]:
        """Nothing to change."""
        return nullcontext()

    def mark(self) -> Any:
        """Nothing to wait for."""
        return None

    def wait(self, mark: Any) -> None:
        """It is done already."""

    def join(self) -> None:
        """It is done already."""


class CudaStreams:
    """A side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def moving(self) -> AbstractContextManager[Any]:
        """Return the context of the side stream."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        context: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def mark(self) -> Any:
        """Return an event."""
        return self._side.record_event()

    def wait(self, mark: Any) -> None:
        """Wait for the event."""
        mark.synchronize()

    def join(self) -> None:
        """Order the model's stream behind the moves."""
        torch.cuda.current_stream(self._device).wait_stream(self._side)


class PageMover:
    """Moves pages between `parts`, tensors whose first dimension is the block id, and bytes in which they follow."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._streams = streams or (CudaStreams(device) if self._pinned else OneStream())
        self._ring: list[tuple[torch.Tensor, Any]] = []
        self._next = 0
        self._begun = False

    def read(self, parts: Sequence[torch.Tensor], block_id: int) -> bytes:
        """Return a page."""
        with self._streams.moving():
            flat = torch.cat([part[block_id].reshape(-1).view(torch.uint8) for part in parts])
            if not self._pinned:
                return bytes(flat.numpy().tobytes())
            target = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            target.copy_(flat, non_blocking=True)
            mark = self._streams.mark()
        self._streams.wait(mark)
        return bytes(target.numpy().tobytes())

    def write(self, parts: Sequence[torch.Tensor], block_id: int, page: bytes) -> None:
        """Begin to fill a page; `join` orders what follows behind it."""
        staging, index = self._staging(len(page))
        staging.numpy()[:] = memoryview(page)
        with self._streams.moving():
            data, start = staging.to(self._device, non_blocking=True), 0
            for part in parts:
                target = part[block_id]
                flat = data[start : start + target.nbytes]
                # A view of another element size must begin at a multiple of it, which a part need not.
                aligned = flat if flat.storage_offset() % target.element_size() == 0 else flat.clone()
                target.copy_(aligned.view(target.dtype).view(target.shape))
                start += target.nbytes
            self._ring[index] = staging, self._streams.mark()
        self._begun = True

    def join(self) -> None:
        """Order the model behind the writes that were begun; to be called before each step."""
        if self._begun:
            self._streams.join()
            self._begun = False

    def _staging(self, size: int) -> tuple[torch.Tensor, int]:
        """Return host memory for a page, and its place in the ring, once what it last held is on the device."""
        index = self._next
        self._next = (index + 1) % _RING
        if index == len(self._ring):
            self._ring.append((torch.empty(0, dtype=torch.uint8), None))
        staging, mark = self._ring[index]
        if mark is not None:
            self._streams.wait(mark)
        if staging.numel() != size:
            staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return staging, index
