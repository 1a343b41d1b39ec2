"""Talks to a line program: lines in, answers out, in order, and never waits for one that does not answer.

Whatever the program does (hang, crash, write rubbish, answer out of order, flood, leave others behind that hold its
output open), `exchange` ends: after the last answer, after `idle_seconds` without any progress, or at
`total_seconds`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO

from kvhash._errors import UsageError

from .matching import Answer, Matcher, ProgramFault, Question

__all__ = ["Answer", "Ended", "ProgramError", "ProgramFault", "Question", "exchange"]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_FAULTS = 20
_STDERR_KEPT = 4096
_CHUNK = 1 << 16
#: How long its end may go unnoticed while what it started holds its output open.
_TICK_SECONDS = 0.1
#: What the program wrote before it ended is in the pipe already; this is for what it started.
_DRAIN_SECONDS = 1.0


class ProgramError(UsageError):
    """The program cannot be started."""

    code = "program-not-started"


@dataclass(frozen=True)
class Ended:
    """The program's exit status, negative for a signal; None where it did not end by itself."""

    status: int | None


class _Running:
    """The process and its three pipes. Nothing here blocks: `turn` waits for at most as long as it is told."""

    def __init__(self, command: str, lines: Iterator[bytes]) -> None:
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise ProgramError(f"{command!r} is no command line: {error}") from None
        if not arguments:
            raise ProgramError("the command line of the program is empty")
        try:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ProgramError(f"{arguments[0]!r} cannot be started: {said}") from None
        self.progress = time.monotonic()
        self.stderr = b""
        self._lines = lines
        self._to_write = memoryview(b"")
        self._unfinished = bytearray()
        self._heard = self.progress
        self._ended: float | None = None
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self._stdin, self._stdout, self._listened = (
            self.process.stdin,
            self.process.stdout,
            self.process.stderr,
        )
        self._selector = selectors.DefaultSelector()
        for stream, event in (
            (self._stdin, selectors.EVENT_WRITE),
            (self._stdout, selectors.EVENT_READ),
            (self._listened, selectors.EVENT_READ),
        ):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, event)

    @property
    def output_ended(self) -> bool:
        """Whether nothing more can come from its stdout."""
        return self._stdout.closed

    def turn(self, seconds: float) -> list[bytes]:
        """Write and read what can be at once, waiting `seconds` at most; return the lines that are whole now."""
        lines: list[bytes] = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._stdin:
                self._write()
            elif key.fileobj is self._stdout:
                lines += self._read()
            else:
                self.listen()
        return lines

    def _close(self, stream: IO[bytes]) -> None:
        if not stream.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()

    def _write(self) -> None:
        if not self._to_write:
            some = bytearray()
            for line in self._lines:
                some += line + b"\n"
                if len(some) >= _CHUNK:
                    break
            self._to_write = memoryview(bytes(some))
            if not some:
                self._close(self._stdin)
                return
        try:
            written = os.write(self._stdin.fileno(), self._to_write[:_CHUNK])
        except BlockingIOError:
            return
        except OSError:  # it has closed its input, as it may
            self._close(self._stdin)
            return
        self._to_write = self._to_write[written:]
        self.progress = time.monotonic()

    def _some(self, stream: IO[bytes]) -> bytes | None:
        """Return what can be read at once; None when there is nothing now, empty at the end."""
        try:
            return os.read(stream.fileno(), _CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read(self) -> list[bytes]:
        data = self._some(self._stdout)
        if data is None:
            return []
        if not data:
            self._close(self._stdout)
            return self.rest()
        self._heard = time.monotonic()
        *whole, last = data.split(b"\n")
        if not whole:
            self._unfinished += last
            return self.rest() if len(self._unfinished) > _MAX_ANSWER_BYTES else []
        whole[0] = bytes(self._unfinished) + whole[0]
        self._unfinished = bytearray(last)
        return whole

    def rest(self) -> list[bytes]:
        """Return the line that was begun and has no end yet, if there is one."""
        rest, self._unfinished = bytes(self._unfinished), bytearray()
        return [rest] if rest else []

    def listen(self) -> None:
        """Keep the end of what it says on stderr."""
        if self._listened.closed:
            return
        data = self._some(self._listened)
        if data:
            self.stderr = (self.stderr + data)[-_STDERR_KEPT:]
        elif data is not None:
            self._close(self._listened)

    def quiet_since_end(self) -> float:
        """Return for how many seconds nothing has come since the program itself ended; 0 while it runs."""
        if self.process.poll() is None:
            return 0.0
        now = time.monotonic()
        self._ended = self._ended or now
        return now - max(self._ended, self._heard)

    def stop(self) -> None:
        """End the program and what runs in its session, and close the pipes without waiting for their ends."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        for stream in (self._stdin, self._stdout, self._listened):
            self._close(stream)
        self._selector.close()

    def status(self) -> int | None:
        """Return the status with which the program ended, negative for a signal; None when it does not end soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return self.process.poll()

    def ending(self) -> str:
        """Return how the program ended, for people: its status and the end of what it said on stderr."""
        status = self.status()
        self.listen()
        died = _signal(status)
        if status is None:
            how = "it closed its output"
        elif died:
            how = f"it was ended by signal {died}"
            with contextlib.suppress(ValueError):
                how = f"it was ended by {signal.Signals(died).name}"
        else:
            how = f"it ended with status {status}"
        said = self.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        return how + (f"; stderr: {' | '.join(said)}" if said else "")


def _signal(status: int | None) -> int:
    """Return the signal that ended the program, itself or within a shell (which then says 128 more); else 0."""
    if status is None or status >= 0 and status - 128 not in set(signal.Signals):
        return 0
    return -status if status < 0 else status - 128


def exchange(
    command: str, questions: Sequence[Question], *, idle_seconds: float = 10.0, total_seconds: float = 600.0
) -> Generator[Answer | ProgramFault | Ended, None, None]:
    """Send every question and yield answers and faults as they come, and `Ended` at last. Raises ProgramError.

    `command` is split as a shell would split it, and run without one. Every question has at most one `Answer`. The
    program is ended when the iterator is closed: close it (`contextlib.closing`) where it may not be used up.

    What the program started and put into a session of its own outlives it: nothing portable ends that.
    """
    running = _Running(command, (question.line for question in questions))
    matcher = Matcher(questions)
    # A fault a question can be honest noise (a log line before each answer); more is a flood.
    most = _MAX_FAULTS + len(questions)
    try:
        end = yield from _answers(running, matcher, most, idle_seconds, total_seconds)
        yield from chain(matcher.order_faults(), matcher.missing(), [end] if end else [])
        yield Ended(running.process.poll())
    finally:
        running.stop()


def _answers(
    running: _Running, matcher: Matcher, most: int, idle_seconds: float, total_seconds: float
) -> Generator[Answer | ProgramFault, None, ProgramFault | None]:
    started = last = time.monotonic()
    while True:
        # A program may answer only when it has read everything, so a line that it took is progress too.
        last = max(last, running.progress)
        now = time.monotonic()
        total, idle = started + total_seconds, last + idle_seconds
        lines = running.turn(min(total - now, idle - now, _TICK_SECONDS))
        over = running.output_ended
        if not over and running.quiet_since_end() >= _DRAIN_SECONDS:
            # What it started may hold its output open for ever: the end of the output is not waited for.
            lines, over = lines + running.rest(), True
        for line in lines:
            last = time.monotonic()
            result = matcher.match(line)
            yield result
            most -= isinstance(result, ProgramFault)
            if len(line) > _MAX_ANSWER_BYTES:
                most = 0
            if most <= 0:
                return ProgramFault(
                    "flood", "stopped reading: too many lines that answer nothing", matcher.next
                )
        if over:
            if matcher.next:
                return ProgramFault("crash", f"no answer: {running.ending()}", matcher.next)
            if _signal(running.status()):
                return ProgramFault("crash", f"everything is answered, then {running.ending()}", None)
            return None
        if now >= total or (now >= idle and not lines):
            limit = f"{total_seconds:g} s in all" if now >= total else f"{idle_seconds:g} s"
            what = "no answer" if matcher.next else "it did not end"
            return ProgramFault("hang", f"{what} within {limit}", matcher.next)
