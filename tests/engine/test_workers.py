"""Slow calls beside the event loop: answered, bounded in number, and no hindrance to an exit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine_ref.server.errors import ApiError
from engine_ref.server.workers import Workers

from ..waiting import DEADLINE_S, wait_for


def test_calls_are_answered_with_what_they_return_or_raise() -> None:
    """Each caller gets its own result or error, more calls than threads included; then nothing is at work."""

    async def main() -> None:
        workers = Workers(2)
        assert await asyncio.gather(*(workers.run(pow, 2, n) for n in range(20))) == [2**n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            await workers.run(divmod, 1, 0)
        assert not workers.busy
        workers.close()

    asyncio.run(main())


def test_no_more_calls_work_than_there_are_threads() -> None:
    """Calls past the bound wait for their turn."""
    gate, begun = threading.Event(), []

    def hold(number: int) -> None:
        begun.append(number)
        gate.wait(DEADLINE_S)

    async def main() -> None:
        workers = Workers(2)
        calls = [asyncio.create_task(workers.run(hold, n)) for n in range(5)]
        await asyncio.to_thread(wait_for, lambda: len(begun) == 2, "two calls")
        gate.set()
        await asyncio.gather(*calls)
        workers.close()

    asyncio.run(main())
    assert sorted(begun) == list(range(5))


def test_closing_answers_who_waits_and_waits_for_nobody() -> None:
    """A call that does not end keeps neither its caller nor the loop once closed, and later calls are refused."""
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        assert threading.current_thread().daemon  # else the interpreter would wait for it
        begun.set()
        gate.wait(DEADLINE_S)

    async def main() -> Workers:
        workers = Workers(1)
        working, queued = (asyncio.create_task(workers.run(hold)) for _ in range(2))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        workers.close()
        for call in (working, queued, workers.run(hold)):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.status == 503
        return workers

    workers = asyncio.run(main())
    assert workers.busy
    gate.set()  # whose loop is gone by now
    wait_for(lambda: not workers.busy, "the end of the call")
