"""``kvhash-router``: engines from a watched file or from flags, then serve."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click
import uvicorn
from starlette.applications import Starlette

from kvhash import KvHashError

from .app import make_app
from .config import (
    AdapterConfig,
    ConfigError,
    HashSettings,
    ModelConfig,
    ProxyConfig,
    RouterConfig,
    parse_engine_flag,
)
from .decision import Policy
from .decision_log import DecisionLog

__all__ = ["main"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="JSON file; read again when it changes."
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="URL[,events=E][,replay=E][,name=N][,ranks=R]",
    help="An engine; may be given again. For one model, instead of --config.",
)
@click.option("--model", default="model", show_default=True, help="The engines' served model name.")
@click.option(
    "--tokenizer", help="Folder or hub id of the tokenizer; without it, only token-id prompts are looked up."
)
@click.option("--chat-template", help="A file that replaces the tokenizer's chat template.")
@click.option("--vllm", default="latest", show_default=True, help="The engines' vLLM release.")
@click.option("--prefix-caching-hash-algo", "algorithm", default="sha256", show_default=True)
@click.option("--hash-seed", help="PYTHONHASHSEED of the engines; left out: unset.")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a block.")
@click.option(
    "--lora", "loras", multiple=True, metavar="NAME=PATH", help="An adapter, its path as the engines got it."
)
@click.option(
    "--index",
    "indexes",
    multiple=True,
    metavar="URL",
    help="redis://... shares the residency index; given again, nodes of one cluster; left out: kept in this process.",
)
@click.option(
    "--strategy",
    type=click.Choice(["prefix", "load", "round-robin"]),
    default="prefix",
    show_default=True,
    help="The last two are there to compare with.",
)
@click.option(
    "--stream-idle-timeout",
    "stream_idle_s",
    type=float,
    default=ProxyConfig().stream_idle_s,
    show_default=True,
    help="Seconds of silence after which a stream that has begun ends with an error.",
)
@click.option("--decision-log", help="File for one JSON line a request; - is stdout.")
@click.option(
    "--log-tokens", is_flag=True, help="Log whole request lines, with token ids, instead of hashes alone."
)
@click.option(
    "--drain-timeout",
    "drain_s",
    type=click.IntRange(0, 86_400),
    default=20,
    show_default=True,
    help="Seconds that requests under way have after SIGTERM; then their streams end with an error.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0 lets the system choose; the log says which.",
)
def cli(
    config_file: Path | None,
    host: str,
    port: int,
    decision_log: str | None,
    log_tokens: bool,
    drain_s: int,
    **flags: Any,
) -> None:
    """Route OpenAI requests to the vLLM engine that holds the longest part of the prompt, weighed against load.

    \b
    Examples:
      kvhash-router --config router.json --decision-log decisions.jsonl
      kvhash-router --model llama --tokenizer ./tokenizer --hash-seed 0 \\
          --engine http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558 \\
          --engine http://10.0.0.2:8000,events=tcp://10.0.0.2:5557,replay=tcp://10.0.0.2:5558
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if config_file is not None:
        if flags["engines"]:
            raise ConfigError("--config and --engine exclude each other")
        config = RouterConfig.load(config_file)
    else:
        config = _from_flags(**flags)
    try:
        bound = _bind(host, port)
    except (OSError, TypeError, ValueError) as error:  # the last two: what no name of a host has
        said = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"cannot listen on {host!a}, port {port}: {said or error}") from None
    with bound:
        log = None if decision_log is None else DecisionLog(decision_log, with_tokens=log_tokens)
        _serve(make_app(config, config_file=config_file, decision_log=log), bound, host, drain_s)


def _serve(app: Starlette, bound: socket.socket, host: str, drain_s: int) -> None:
    # One file a connection, of which a stream takes two.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGHUP, lambda *_: app.state.read_again())
    click.echo(f"kvhash-router listens on http://{host}:{bound.getsockname()[1]}", err=True)
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain_s)
    )
    # uvicorn raises the signal that ended it once more; being told to end, and ending, is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[bound])


class _Server(uvicorn.Server):
    """A server that at a second Ctrl-C gives requests under way no more time, and still stops as it should."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; told so again, end what is under way, as when its time has run out."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
            return
        for task in list(self.server_state.tasks):
            task.cancel()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio turns Nagle's algorithm off on what is accepted: no 40 ms between two writes.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except BaseException:
        bound.close()
        raise
    return bound


def _from_flags(
    *,
    engines: tuple[str, ...],
    model: str,
    tokenizer: str | None,
    chat_template: str | None,
    vllm: str,
    algorithm: str,
    hash_seed: str | None,
    block_size: int,
    loras: tuple[str, ...],
    indexes: tuple[str, ...],
    strategy: Any,
    stream_idle_s: float,
) -> RouterConfig:
    if not engines:
        raise ConfigError("expected --config or at least one --engine")
    adapters: dict[str, AdapterConfig] = {}
    for text in loras:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"expected --lora NAME=PATH, got {text!r}")
        if name in adapters:
            raise ConfigError(f"two adapters are named {name!r}")
        adapters[name] = AdapterConfig(path=path)
    settings = HashSettings(vllm=vllm, algorithm=algorithm, hash_seed=hash_seed, block_size=block_size)
    served = ModelConfig(hash=settings, tokenizer=tokenizer, chat_template=chat_template, adapters=adapters)
    return RouterConfig(
        models={model: served},
        engines=tuple(parse_engine_flag(text) for text in engines),
        policy=Policy(strategy=strategy),
        proxy=ProxyConfig(stream_idle_s=stream_idle_s),
        index=indexes if len(indexes) > 1 else next(iter(indexes), None),
    ).checked()


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except KvHashError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    return 0
