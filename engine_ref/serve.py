"""`python -m engine_ref serve`: an HTTP server with vLLM's flags; what they mean is in vLLM's documentation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click
import uvicorn

from kvhash import Contract, KvHashError, UsageError
from kvhash._errors import InvalidRequestError

from .build import freeze_heap, make_engine
from .flags import VllmCommand, engine_flags, engine_options, read_adapters, say_without_effect
from .metrics import EngineMetrics
from .options import EngineOptions
from .server import Frontend, make_app
from .server.prompts import Prompts
from .server.text import EngineTokenizer

__all__ = ["serve"]

_log = logging.getLogger(__name__)
_LONGEST_DRAIN_S = 86_400
#: Seconds that clients get, once every request has ended, to read what was sent to them.
_LAST_READ_S = 5


@click.command(cls=VllmCommand)
@click.argument("model")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; vLLM listens everywhere."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."
)
@click.option("--served-model-name", multiple=True, metavar="NAME...", help="Default: MODEL.")
@click.option("--tokenizer", metavar="FOLDER", help="For text and chats; default: MODEL, where it has one.")
@click.option("--chat-template", metavar="FILE", help="A Jinja file, or the template itself.")
@click.option("--trust-request-chat-template", is_flag=True, help="Take templates from requests.")
@engine_flags
@click.option("--disable-log-stats", is_flag=True, help="No log line every 10 s (VLLM_LOG_STATS_INTERVAL).")
@click.option("--disable-uvicorn-access-log", is_flag=True)
@click.option("--uvicorn-log-level", default="info", show_default=True)
@click.option(
    "--shutdown-timeout", type=click.FloatRange(0), default=0, show_default=True, help="Seconds to drain."
)
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL over HTTP as vLLM does: completions, chats, metrics, and KV events.

    MODEL is a folder (its config.json gives the vocabulary and lengths) or any name. When requests can be sent, one
    JSON line on stdout says where: {"http": ..., "ranks": [{"rank", "endpoint", "replay_endpoint"}]}. The
    environment is read as vLLM reads it: PYTHONHASHSEED, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES, VLLM_SERVER_DEV_MODE.

    \b
    Examples:
      python -m engine_ref serve tiny --block-size 16 --num-gpu-blocks-override 512
      python -m engine_ref serve ./model --kv-events-config '{"enable_kv_cache_events": true,
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}' --emulate-vllm 0.32.0
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=flags["uvicorn_log_level"].upper(),
        format="%(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    say_without_effect(flags)
    if not 0 <= flags["shutdown_timeout"] <= _LONGEST_DRAIN_S:
        raise InvalidRequestError(f"expected --shutdown-timeout as 0 to {_LONGEST_DRAIN_S} seconds")
    tokenizer = _tokenizer(model, flags["tokenizer"])
    options = engine_options(model, flags, tokenizer.vocab_size if tokenizer else None)
    listening = _listen(flags["host"], flags["port"])
    names = tuple(flags["served_model_name"]) or (model,)
    adapters = read_adapters(flags["lora_modules"])
    if taken := adapters.keys() & set(names):
        raise InvalidRequestError(
            f"expected adapters of other names than the model's in --lora-modules, got {min(taken)!r}"
        )
    template = _chat_template(flags["chat_template"], tokenizer)
    ranks = flags["data_parallel_size"]
    metrics = EngineMetrics(
        names[0],
        ranks=ranks,
        max_model_len=options.max_model_len,
        cache_config={
            "block_size": options.block_size,
            "num_gpu_blocks": options.num_gpu_blocks,
            "enable_prefix_caching": options.enable_prefix_caching,
            "prefix_caching_hash_algo": options.prefix_caching_hash_algo,
        },
        max_loras=len(adapters) if adapters else None,
    )
    frontend = Frontend(_rank_maker(options, ranks), metrics)
    prompts = Prompts(
        options=options,
        model_names=names,
        adapters=adapters,
        tokenizer=tokenizer,
        chat_template=template,
        trust_request_chat_template=flags["trust_request_chat_template"],
    )
    app = make_app(
        frontend,
        prompts,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"),
        log_interval_s=None if flags["disable_log_stats"] else _log_interval(),
        release=str(Contract.for_vllm(options.emulate_vllm).release),
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=not flags["disable_uvicorn_access_log"],
        log_level=flags["uvicorn_log_level"],
        lifespan="on",
        timeout_graceful_shutdown=2 * _LAST_READ_S,
    )
    server = _Server(config, frontend, listening, flags["shutdown_timeout"])
    _log.info(
        "engine_ref: %d blocks of %d tokens, hashes and events of vLLM %s, %s, %d rank(s)",
        options.num_gpu_blocks,
        options.block_size,
        options.emulate_vllm,
        options.prefix_caching_hash_algo,
        ranks,
    )
    # uvicorn raises the signal that ended it once more; being told to end and ending is no failure.
    freeze_heap()
    signal.signal(signal.SIGTERM, _do_nothing)
    server.run(sockets=[listening])
    if not server.started:
        raise UsageError("the server did not start", code="not-started")
    if frontend.workers.busy:  # all is published and answered; a tokenizer may be at work for minutes
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _do_nothing(_: int, __: FrameType | None) -> None:
    return


def _rank_maker(options: EngineOptions, ranks: int) -> Any:
    if ranks == 1:
        return lambda rank, deliver: make_engine(options, deliver, rank=rank)
    from .rank_process import RankProcess

    return lambda rank, deliver: RankProcess(options, deliver, rank=rank)


class _Server(uvicorn.Server):
    """Says on stdout when it is ready, and drains or ends requests before connections are closed."""

    def __init__(
        self, config: uvicorn.Config, frontend: Frontend, listening: socket.socket, shutdown_timeout: float
    ) -> None:
        super().__init__(config)
        self._frontend = frontend
        self._listening = listening
        self._shutdown_timeout = shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say where everything is."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        host, port = self._listening.getsockname()[:2]
        ready = {
            "http": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "ranks": [
                {"rank": i, "endpoint": _reachable(events), "replay_endpoint": _reachable(replay)}
                for i, (events, replay) in enumerate(rank.endpoints for rank in self._frontend.ranks)
            ],
        }
        try:
            print(json.dumps(ready), flush=True)  # noqa: T201
        except BrokenPipeError:  # nobody reads it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End requests first, so that no connection is cut in the middle of an answer."""
        await asyncio.wait_for(self._frontend.drain(self._shutdown_timeout), self._shutdown_timeout + 5)
        # A client that reads nothing, or never sends the rest of its body, would keep its connection for ever.
        cutting = asyncio.get_running_loop().call_later(_LAST_READ_S, self._cut_connections)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            cutting.cancel()

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def _reachable(endpoint: str | None) -> str | None:
    """Return where a subscriber on this machine connects to an endpoint that is bound everywhere."""
    if endpoint is None:
        return None
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else starts, so that a port in use is one clear line."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # The protocol is said so that asyncio turns Nagle's delay off, which costs 40 ms an answer.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", code="cannot-listen"
        ) from None
    return listening


def _tokenizer(model: str, folder: str | None) -> EngineTokenizer | None:
    if folder is not None:
        return EngineTokenizer(folder)
    path = Path(model).expanduser()
    if not (path / "tokenizer_config.json").is_file() and not (path / "tokenizer.json").is_file():
        return None
    return EngineTokenizer(path)


def _chat_template(value: str | None, tokenizer: EngineTokenizer | None) -> str | None:
    """Return the template, which parses; raises InvalidRequestError."""
    if value is None:
        return None
    path = Path(value)
    if "{" not in value and not path.is_file():
        raise InvalidRequestError(f"no such chat template: {value}")
    try:
        template = path.read_text(encoding="utf-8") if "{" not in value else value
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the chat template {value} is no UTF-8 text: {error}") from None
    if tokenizer is not None:
        from jinja2 import TemplateSyntaxError

        try:
            tokenizer.encode_chat([{"role": "user", "content": "x"}], chat_template=template)
        except KvHashError as error:  # what a template says to this one chat is its own affair
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise InvalidRequestError(f"the chat template does not parse: {error.__cause__}") from None
    return template


def _log_interval() -> float:
    text = os.environ.get("VLLM_LOG_STATS_INTERVAL", "10")
    try:
        return max(float(text), 0.1)
    except ValueError:
        raise UsageError(
            f"VLLM_LOG_STATS_INTERVAL is {text!r}; expected seconds", code="invalid-option"
        ) from None
