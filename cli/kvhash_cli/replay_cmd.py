"""``kvevents replay``: serve a recording as the engine did."""

from __future__ import annotations

import math
import time
from typing import Any

import click

from kvhash import UsageError
from kvhash.events.player import Player
from kvhash.events.sources import FileSource

from .stream import serve_options

__all__ = ["replay"]


def _speed(text: str) -> float | None:
    if text == "full":
        return None
    try:
        speed = float(text.removesuffix("x"))
        if not math.isfinite(speed):
            raise ValueError
        return speed
    except ValueError:
        raise UsageError(
            f"--speed is a number such as 1 or 10x, or full; got {text!r}", code="invalid-speed"
        ) from None


@click.command()
@click.argument("file")
@click.option("--endpoint", default="tcp://127.0.0.1:5557", show_default=True, help="Where rank 0 publishes.")
@click.option(
    "--replay-endpoint", default=None, help="Where rank 0 answers replay requests. [default: no replay]"
)
@click.option("--speed", default="1", show_default=True, metavar="1|Nx|full", help="Pace of the recording.")
@click.option("--loop", is_flag=True, help="Begin anew at the end, with the same numbers and payloads.")
@serve_options
@click.option(
    "--only-endpoint", default=None, metavar="ENDPOINT", help="Play only what came from this endpoint."
)
@click.option(
    "--vllm", "release", default="latest", show_default=True, metavar="RELEASE", help="Framing of the replay."
)
def replay(
    file: str, speed: str, loop: bool, delay: float, linger: float, endpoint: str, **options: Any
) -> None:
    """Serve a recording as a live engine would: the same messages and numbers, PUB and replay socket.

    A loopback endpoint such as tcp://127.0.0.1:5557 is bound here, unlike vLLM, which would connect to it.

    \b
    Example:
      kvevents replay engine.kvrec --speed 10x --replay-endpoint tcp://127.0.0.1:5558
    """
    player = Player(FileSource(file), endpoint, speed=_speed(speed), bind=True, **options)
    with player:
        for rank, (publishes, replays) in player.endpoints.items():
            click.echo(f"rank {rank}: {publishes}" + (f", replay {replays}" if replays else ""), err=True)
        time.sleep(delay)
        while True:
            played = player.play()
            click.echo(f"{played} messages played", err=True)
            if not loop:
                break
        time.sleep(linger)
