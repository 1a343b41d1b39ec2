"""The inbox between engines and the event loop: order, a bound, and a loop that always answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from engine_ref.report import EngineStats, Output, StepReport
from engine_ref.server.inbox import LIMIT, TURN_OUTPUTS, ReportInbox

from ..waiting import DEADLINE_S, wait_for


def report(number: int) -> StepReport:
    """Return a report that can be told from others."""
    return StepReport(number, [], EngineStats())


def run_beside(inbox: ReportInbox, count: int) -> tuple[threading.Thread, list[int]]:
    """Put `count` reports from a thread of its own; returns it and what it has put so far."""
    done: list[int] = []

    def put() -> None:
        for number in range(count):
            inbox.put(report(number))
            done.append(number)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    return thread, done


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop its turns until something is so."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0)


def test_reports_come_whole_and_in_order() -> None:
    """Every report of a thread is taken, in the order in which it was put."""
    taken: list[int] = []

    async def main() -> None:
        inbox = ReportInbox(lambda each: taken.append(each.rank))
        inbox.open()
        thread, _ = run_beside(inbox, 20 * LIMIT)
        await until(lambda: len(taken) == 20 * LIMIT)
        thread.join(DEADLINE_S)

    asyncio.run(main())
    assert taken == list(range(20 * LIMIT))


def test_an_engine_cannot_run_away_from_its_reader() -> None:
    """While the loop does something else an engine gets `LIMIT` reports ahead and waits; no turn takes more."""
    taken: list[int] = []
    turns: list[int] = []

    async def main() -> None:
        inbox = ReportInbox(lambda each: taken.append(each.rank))
        inbox.open()
        thread, put = run_beside(inbox, 10 * LIMIT)
        wait_for(lambda: len(put) >= LIMIT, "a full inbox")
        thread.join(0.05)
        assert thread.is_alive()
        assert (len(put), taken) == (LIMIT, [])
        while len(taken) < 10 * LIMIT:
            before = len(taken)
            await asyncio.sleep(0)
            turns.append(len(taken) - before)
        thread.join(DEADLINE_S)

    asyncio.run(main())
    assert max(turns) <= LIMIT
    assert taken == list(range(10 * LIMIT))


@pytest.mark.parametrize("size", [1, 200, TURN_OUTPUTS, 3 * TURN_OUTPUTS])
def test_the_loop_has_its_turn_after_a_bounded_number_of_outputs(size: int) -> None:
    """However many outputs a report holds, a turn begins no report once it has handed out `TURN_OUTPUTS` of them."""
    taken: list[int] = []
    turns: list[int] = []
    outputs = [Output(str(number), [number]) for number in range(size)]

    async def main() -> None:
        inbox = ReportInbox(lambda each: taken.append(each.rank))
        inbox.open()
        for number in range(2 * LIMIT):
            inbox.put(StepReport(number, outputs, EngineStats()))
        while len(taken) < 2 * LIMIT:
            before = len(taken)
            await asyncio.sleep(0)
            turns.append(len(taken) - before)

    asyncio.run(main())
    assert max(turns) <= -(-TURN_OUTPUTS // size)
    assert taken == list(range(2 * LIMIT))


def test_the_loop_has_its_turn_when_outputs_are_dear() -> None:
    """A report that takes long to take in ends the turn, however few outputs it holds."""
    taken: list[int] = []
    turns: list[int] = []

    def take(each: StepReport) -> None:
        end = time.monotonic() + 0.006
        while time.monotonic() < end:
            pass
        taken.append(each.rank)

    async def main() -> None:
        inbox = ReportInbox(take)
        inbox.open()
        for number in range(10):
            inbox.put(report(number))
        while len(taken) < 10:
            before = len(taken)
            await asyncio.sleep(0)
            turns.append(len(taken) - before)

    asyncio.run(main())
    assert max(turns) == 1
    assert taken == list(range(10))


def test_the_loop_itself_never_waits() -> None:
    """A report that is put in the loop's own thread is queued whatever waits, since waiting there would be for ever."""
    taken: list[int] = []

    async def main() -> None:
        inbox = ReportInbox(lambda each: taken.append(each.rank))
        inbox.open()
        for number in range(3 * LIMIT):
            inbox.put(report(number))
        await until(lambda: len(taken) == 3 * LIMIT)

    asyncio.run(main())


def test_closing_lets_go_of_who_waits() -> None:
    """After `close` an engine that waited goes on, though the loop takes nothing: closing waits for engines."""

    async def main() -> None:
        inbox = ReportInbox(lambda each: None)
        inbox.open()
        thread, put = run_beside(inbox, 2 * LIMIT)
        wait_for(lambda: len(put) >= LIMIT, "a full inbox")
        inbox.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    asyncio.run(main())


def test_a_loop_that_is_gone_keeps_nobody() -> None:
    """An engine that waits for a loop which ended without `close` goes on too, and so do later reports."""
    threads: list[threading.Thread] = []

    async def main() -> None:
        inbox = ReportInbox(lambda each: None)
        inbox.open()
        thread, put = run_beside(inbox, 5 * LIMIT)
        threads.append(thread)
        wait_for(lambda: len(put) >= LIMIT, "a full inbox")

    asyncio.run(main())
    threads[0].join(DEADLINE_S)
    assert not threads[0].is_alive()


def test_one_report_that_fails_costs_no_other() -> None:
    """A report that cannot be taken in is logged; the ones behind it are taken."""
    taken: list[int] = []

    def take(each: StepReport) -> None:
        if each.rank == 1:
            raise RuntimeError("a fault of the reader")
        taken.append(each.rank)

    async def main() -> None:
        inbox = ReportInbox(take)
        inbox.open()
        for number in range(4):
            inbox.put(report(number))
        await until(lambda: len(taken) == 3)

    asyncio.run(main())
    assert taken == [0, 2, 3]
