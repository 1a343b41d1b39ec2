"""The ``kvevents`` command: its subcommands are imported when they are called or listed."""

from __future__ import annotations

import click

from .main import CONTEXT, LazyGroup, version_option

__all__ = ["kvevents"]


class _Kvevents(LazyGroup):
    lazy = {  # noqa: RUF012 - a constant of the class
        "decode": ".decode_cmd:decode",
        "doctor": ".doctor_cmd:doctor",
        "export": ".export_cmd:export",
        "index": ".index_cmd:index",
        "publish": ".publish_cmd:publish",
        "record": ".record_cmd:record",
        "replay": ".replay_cmd:replay",
        "stats": ".stats_cmd:stats",
        "tail": ".tail_cmd:tail",
        "verify": ".verify_cmd:verify",
    }


@click.command(cls=_Kvevents, context_settings=CONTEXT)
@version_option
def kvevents() -> None:
    """Follow, record, replay, decode, verify and diagnose the KV event streams of vLLM engines.

    \b
    Example:
      kvevents tail tcp://127.0.0.1:5557
    """
