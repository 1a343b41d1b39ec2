"""Talks to a line program: lines in, answers out, in order, and never waits for one that does not answer.

Whatever the program does (hang, crash, write rubbish, answer out of order, flood), `exchange` ends: after the last
answer, after `idle_seconds` without any progress, or at `total_seconds`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from kvhash._errors import UsageError

__all__ = ["Answer", "ProgramError", "ProgramFault", "Question", "exchange"]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_FAULTS = 20
_STDERR_KEPT = 4096


class ProgramError(UsageError):
    """The program cannot be started."""

    code = "program-not-started"


@dataclass(frozen=True)
class Question:
    """One line to send. ``loose``: its answer may carry null as id, since the line itself may be unreadable."""

    id: str
    line: bytes
    loose: bool = False


@dataclass(frozen=True)
class Answer:
    """What came for a question: the answer's object without ``id``."""

    id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class ProgramFault:
    """What the program did wrong; ``id``: the question that it was to answer then, where there is one.

    ``kind``: ``hang``, ``crash``, ``rubbish``, ``out-of-order``, ``extra-answer`` or ``flood``. After ``hang``,
    ``crash`` and ``flood`` nothing more comes.
    """

    kind: str
    message: str
    id: str | None = None


class _Running:
    """The process, its threads, and when something last happened."""

    def __init__(self, command: str, lines: Sequence[bytes]) -> None:
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
            )
        except OSError as error:
            raise ProgramError(f"{arguments[0]!r} cannot be started: {error.strerror or error}") from None
        self.progress = time.monotonic()
        self.output: queue.Queue[bytes | None] = queue.Queue(maxsize=10000)
        self.stderr = b""
        self._stopping = threading.Event()
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        for target, argument in (
            (self._write, (self.process.stdin, lines)),
            (self._read, (self.process.stdout,)),
            (self._listen, (self.process.stderr,)),
        ):
            threading.Thread(target=target, args=argument, daemon=True).start()

    def _write(self, stdin: IO[bytes], lines: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                stdin.write(line + b"\n")
                stdin.flush()
                self.progress = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            stdin.close()

    def _read(self, stdout: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self._stopping.is_set():
                line = stdout.readline(_MAX_ANSWER_BYTES)
                if not line:
                    break
                self._put(line)
        self._put(None)

    def _put(self, line: bytes | None) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self.output.put(line, timeout=0.2)
                return

    def _listen(self, stderr: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := stderr.read1(4096):  # type: ignore[attr-defined]
                self.stderr = (self.stderr + data)[-_STDERR_KEPT:]

    def stop(self) -> None:
        """End the program and whatever it started."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()

    def ending(self) -> str:
        """Return how the program ended, for people: its status and the end of what it said on stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        status = self.process.poll()
        if status is None:
            how = "it closed its output"
        elif status < 0:
            with contextlib.suppress(ValueError):
                how = f"it was ended by {signal.Signals(-status).name}"
        else:
            how = f"it ended with status {status}"
        said = self.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        return how + (f"; stderr: {' | '.join(said)}" if said else "")


def exchange(
    command: str, questions: Sequence[Question], *, idle_seconds: float = 10.0, total_seconds: float = 600.0
) -> Iterator[Answer | ProgramFault]:
    """Send every question and yield answers and faults as they come. Raises ProgramError.

    `command` is split as a shell would split it, and run without one. Every question has at most one `Answer`.
    """
    running = _Running(command, [question.line for question in questions])
    try:
        yield from _answers(running, deque(questions), idle_seconds, total_seconds)
    finally:
        running.stop()


def _answers(
    running: _Running, waiting: deque[Question], idle_seconds: float, total_seconds: float
) -> Iterator[Answer | ProgramFault]:
    started = answered = time.monotonic()
    faults = 0
    while True:
        now = time.monotonic()
        # A program may answer only when it has read everything, so a line that it took is progress too.
        left = min(started + total_seconds, max(answered, running.progress) + idle_seconds) - now
        first = waiting[0].id if waiting else None
        try:
            line = running.output.get(timeout=max(0.0, left))
        except queue.Empty:
            if max(answered, running.progress) + idle_seconds > time.monotonic() < started + total_seconds:
                continue
            over = time.monotonic() >= started + total_seconds
            limit = f"{total_seconds:g} s in all" if over else f"{idle_seconds:g} s"
            what = "no answer" if waiting else "it did not end"
            yield ProgramFault("hang", f"{what} within {limit}", first)
            return
        if line is None:
            if waiting:
                yield ProgramFault("crash", f"no answer: {running.ending()}", first)
            return
        answered = time.monotonic()
        result = _one(line, waiting)
        yield result
        faults += isinstance(result, ProgramFault)
        if faults >= _MAX_FAULTS:
            yield ProgramFault(
                "flood", f"stopped reading after {faults} such lines", waiting[0].id if waiting else None
            )
            return


def _one(line: bytes, waiting: deque[Question]) -> Answer | ProgramFault:
    first = waiting[0].id if waiting else None
    shown = line[:80].decode("utf-8", "replace").strip()
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return ProgramFault("rubbish", f"a line that is no JSON: {shown!r}", first)
    if not isinstance(body, dict) or "id" not in body:
        return ProgramFault("rubbish", f"a line that is no answer (an object with an id): {shown!r}", first)
    identity = body.pop("id")
    if not waiting:
        return ProgramFault("extra-answer", f"an answer after the last question: {shown!r}")
    if identity == waiting[0].id or (waiting[0].loose and identity is None):
        return Answer(waiting.popleft().id, body)
    for question in waiting:
        if question.id == identity:
            waiting.remove(question)
            return ProgramFault("out-of-order", f"answered {identity!r} before it", first)
    return ProgramFault("rubbish", f"an answer to no open question: id {str(identity)[:60]!r}", first)
