"""The residency index beside a Python dict index and Dynamo's RadixTree: one list of events, each in a fresh process.

Printed for each: block operations applied a second, the median lookup of a long prompt over all engines, and bytes of
memory per block and engine (resident set, after minus before). A ratio is to the dict index of the same run.

* **dict**: for each engine a dict of block hash -> copies, and a lookup that walks block by block: the least that a
  router can do, with none of the rules of docs/index.md;
* **kvhash python**: `kvhash.index.ResidencyIndex` fed with decoded events; **kvhash native**: the same (where this
  build has the native core) fed with payloads, which it decodes itself;
* **Dynamo**: ``RadixTree`` of ai-dynamo-runtime, where that is installed. Its events are JSON, encoded beforehand;
* **shared**: `SharedResidencyIndex` on a local redis-server, where there is one.

Then the native index, fed by one thread and by two (each with engines of its own, which the interpreter's lock does not
stop), lookups beside them: ten with pauses of 0.2 ms, then one after 2 ms ("seldom": by then the machine has put other
things into the processor's caches); and the bytes of a block at 10 million blocks.

The events: each engine stores one prompt of 6,250 blocks that all share, then short prompts of 100 blocks come and
most of them go again, as an engine evicts them: from their ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROMPT_BLOCKS = 6250
_STEP = 50
_NAMES = ("dict", "kvhash python", "kvhash native", "Dynamo", "shared")

#: (engine, whether it is a store, parent or None, hashes)
Step = tuple[int, bool, "int | None", list[int]]


def steps(engines: int, blocks: int) -> Iterator[Step]:
    """Yield about `blocks` block operations beyond the shared prompt's."""
    rng = random.Random(1)
    shared = prompt()
    for engine in range(engines):
        for first in range(0, PROMPT_BLOCKS, _STEP):
            yield engine, True, shared[first - 1] if first else None, shared[first : first + _STEP]
    done = 0
    waiting: list[tuple[int, list[int]]] = []
    while done < blocks:
        engine = rng.randrange(engines)
        chain = [rng.getrandbits(63) for _ in range(100)]
        yield engine, True, None, chain[:_STEP]
        yield engine, True, chain[_STEP - 1], chain[_STEP:]
        waiting.append((engine, chain))
        done += 100
        if len(waiting) > 500:
            engine, chain = waiting.pop(rng.randrange(len(waiting)))
            yield engine, False, None, chain[: _STEP - 1 : -1]
            yield engine, False, None, chain[_STEP - 1 :: -1]
            done += 100


def prompt() -> list[int]:
    """Return the long prompt's hashes."""
    rng = random.Random(0)
    return [rng.getrandbits(63) for _ in range(PROMPT_BLOCKS)]


class DictIndex:
    """The least that a router can do."""

    def __init__(self, engines: int) -> None:
        self.held: list[dict[int, int]] = [{} for _ in range(engines)]

    @staticmethod
    def prepare(step: Step) -> Any:
        """Return a step as decoded events."""
        return step[0], _batch(step)

    def apply(self, item: Any) -> None:
        """Apply a decoded batch."""
        from kvhash.events.schema import BlockStored, hash_key

        engine, batch = item
        held = self.held[engine]
        for event in batch.events:
            if isinstance(event, BlockStored):
                for value in event.block_hashes:
                    key = hash_key(value)
                    held[key] = held.get(key, 0) + 1
            else:
                for value in event.block_hashes:
                    key = hash_key(value)
                    if held[key] == 1:
                        del held[key]
                    else:
                        held[key] -= 1

    def lookup(self, hashes: Sequence[int]) -> int:
        """Return the blocks of all engines' matches."""
        total = 0
        for held in self.held:
            for value in hashes:
                if value not in held:
                    break
                total += 1
        return total


class OurIndex:
    """`ResidencyIndex`, as it is used."""

    def __init__(self, engines: int) -> None:
        from kvhash.index import ResidencyIndex

        self.names = [f"engine-{i}" for i in range(engines)]
        self.index = ResidencyIndex()

    @staticmethod
    def prepare(step: Step) -> Any:
        """Return a step as decoded events."""
        return f"engine-{step[0]}", _batch(step)

    def apply(self, item: Any) -> None:
        """Apply a decoded batch."""
        self.index.apply(*item)

    def lookup(self, hashes: Sequence[int]) -> int:
        """Return the blocks of all engines' matches."""
        return sum(match.blocks for match in self.index.longest_prefix(hashes).values())


class OurPayloads(OurIndex):
    """`ResidencyIndex` fed with payloads as they were published: decoding is part of what is measured."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._waiting: dict[str, list[bytes]] = {}

    @staticmethod
    def prepare(step: Step) -> Any:
        """Return a step as the payload that vLLM publishes, 16 tokens a block."""
        from kvhash.events import encode_batch

        return f"engine-{step[0]}", encode_batch(_batch(step, 16))

    def apply(self, item: Any) -> None:
        """Queue a payload; an engine's are applied 64 at once, as a subscriber's backlog is."""
        waiting = self._waiting.setdefault(item[0], [])
        waiting.append(item[1])
        if len(waiting) == 64:
            self.index.apply_payloads(item[0], waiting)
            waiting.clear()

    def finish(self) -> None:
        """Apply what is left."""
        for engine, waiting in self._waiting.items():
            self.index.apply_payloads(engine, waiting)


class Dynamo:
    """Dynamo's tree; a block's local hash is its block hash, so both walk the same prompts."""

    def __init__(self, engines: int) -> None:
        from dynamo._core import RadixTree

        del engines
        self.tree = RadixTree()

    @staticmethod
    def prepare(step: Step) -> Any:
        """Return a step as the JSON that the tree reads."""
        engine, is_store, parent, hashes = step
        if is_store:
            blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
            data: dict[str, Any] = {"stored": {"parent_hash": parent, "blocks": blocks}}
        else:
            data = {"removed": {"block_hashes": hashes}}
        return engine, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode()

    def apply(self, item: Any) -> None:
        """Apply an event."""
        self.tree.apply_event(*item)

    def lookup(self, hashes: Sequence[int]) -> int:
        """Return the blocks of all engines' matches."""
        scores: dict[Any, int] = self.tree.find_matches(list(hashes)).scores
        return sum(scores.values())


class Shared:
    """`SharedResidencyIndex`, records written 64 to a round trip."""

    def __init__(self, engines: int) -> None:
        import redis

        from kvhash.index.shared import SharedResidencyIndex

        del engines
        client = redis.Redis(unix_socket_path=os.environ["KVHASH_BENCH_REDIS"])
        self.index = SharedResidencyIndex(client)
        self._seqs: dict[str, int] = {}
        self._waiting: dict[str, list[Any]] = {}

    prepare = staticmethod(OurIndex.prepare)

    def apply(self, item: Any) -> None:
        """Queue a batch; every 64 of an engine are written."""
        from kvhash.events.records import Batch

        engine, batch = item
        seq = self._seqs[engine] = self._seqs.get(engine, -1) + 1
        waiting = self._waiting.setdefault(engine, [])
        waiting.append(Batch(engine, 0, seq, b"", 0, batch, b""))
        if len(waiting) == 64:
            self.index.apply_records(engine, waiting)
            waiting.clear()

    def finish(self) -> None:
        """Write what is left."""
        for engine, waiting in self._waiting.items():
            self.index.apply_records(engine, waiting)

    def lookup(self, hashes: Sequence[int]) -> int:
        """Return the blocks of all engines' matches."""
        return sum(match.blocks for match in self.index.longest_prefix(hashes).values())


def _batch(step: Step, block_size: int = 1) -> Any:
    from kvhash.events.schema import BlockRemoved, BlockStored, EventBatch

    _, is_store, parent, hashes = step
    if not is_store:
        return EventBatch(1.0, (BlockRemoved(tuple(hashes), medium="GPU"),), 0)
    tokens = _TOKENS[: len(hashes) * block_size]
    return EventBatch(1.0, (BlockStored(tuple(hashes), parent, tokens, block_size, medium="GPU"),), 0)


_TOKENS = tuple(range(_STEP * 16))


def _kind(name: str) -> Any:
    return {"dict": DictIndex, "kvhash native": OurPayloads, "Dynamo": Dynamo, "shared": Shared}.get(
        name, OurIndex
    )


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, engines: int, blocks: int, lookups: int) -> dict[str, Any]:
    """Return what one index takes, in this process."""
    kind = _kind(name)
    listed = list(steps(engines, blocks))
    operations = sum(len(step[3]) for step in listed)
    held: dict[tuple[int, int], int] = {}
    for engine, is_store, _, hashes in listed:
        for value in hashes:
            if is_store:
                held[engine, value] = 1
            else:
                held.pop((engine, value), None)
    count = len(held)
    del held
    items = [kind.prepare(step) for step in listed]
    del listed
    before = _resident()
    index = kind(engines)
    began = time.perf_counter()
    for item in items:
        index.apply(item)
    if hasattr(index, "finish"):
        index.finish()
    hashes = prompt()
    found = index.lookup(hashes)  # a tree with a thread of its own has applied all by then
    apply_s = time.perf_counter() - began
    bytes_per_block = (_resident() - before) / count
    times = []
    for _ in range(lookups):
        began = time.perf_counter()
        index.lookup(hashes)
        times.append(time.perf_counter() - began)
    if found != engines * PROMPT_BLOCKS:
        sys.exit(f"{name}: {found} blocks matched, {engines * PROMPT_BLOCKS} are there")
    return {
        "ops_per_s": operations / apply_s,
        "lookup_us": statistics.median(times) * 1e6,
        "bytes_per_block": bytes_per_block,
        "blocks": count,
    }


#: Seconds between lookups beside the feeding.
OFTEN_S, SELDOM_S = 0.0002, 0.002


def measure_cores(engines: int, blocks: int, lookups: int) -> list[dict[str, Any]]:
    """Return what the native index does when one thread feeds it, and when two do, with and without lookups beside."""
    queues: dict[str, list[bytes]] = {}
    operations = 0
    for step in steps(engines, blocks):
        engine, payload = OurPayloads.prepare(step)
        queues.setdefault(engine, []).append(payload)
        operations += len(step[3])
    hashes = prompt()
    results = []
    for threads, asking in ((1, False), (2, False), (1, True), (2, True)) * 3:
        index = OurPayloads(engines).index
        feeders = [_Feeder(index, queues, first, threads) for first in range(threads)]
        times: dict[str, list[float]] = {"often": [], "seldom": []}

        def ask(index: Any = index, times: dict[str, list[float]] = times) -> None:
            for when, pause_s, count in (("often", OFTEN_S, 10), ("seldom", SELDOM_S, 1)):
                for _ in range(count):
                    time.sleep(pause_s)
                    asked = time.perf_counter()
                    index.longest_prefix(hashes)
                    times[when].append(time.perf_counter() - asked)

        began = time.perf_counter()
        for feeder in feeders:
            feeder.start()
        while asking and any(feeder.is_alive() for feeder in feeders):
            ask()
        for feeder in feeders:
            feeder.join()
        took = time.perf_counter() - began
        if not asking:  # the same index, nobody feeding it
            for _ in range(max(lookups, 100)):
                ask()
        else:
            for kept in times.values():
                del kept[: len(kept) // 4]  # the first ones find little
        often = sorted(times["often"])
        results.append(
            {
                "threads": threads,
                "asking": asking,
                "ops_per_s": operations / took,
                "ops_per_cpu_s": operations / sum(feeder.cpu_s for feeder in feeders),
                "lookup_us": statistics.median(often) * 1e6,
                "p99_us": often[len(often) * 99 // 100] * 1e6,
                "seldom_us": statistics.median(times["seldom"]) * 1e6,
            }
        )
    return results


class _Feeder(threading.Thread):
    """Applies every `step`-th engine's payloads, 64 at once, its engines in turn."""

    def __init__(self, index: Any, queues: dict[str, list[bytes]], first: int, step: int) -> None:
        super().__init__()
        self._index = index
        self._queues = list(queues.items())[first::step]
        self.cpu_s = 0.0

    def run(self) -> None:
        """Apply all of it."""
        began = time.thread_time()
        for at in range(0, max(len(queue) for _, queue in self._queues), 64):
            for name, queue in self._queues:
                if at < len(queue):
                    self._index.apply_payloads(name, queue[at : at + 64])
        self.cpu_s = time.thread_time() - began


def second_processor() -> float:
    """Return how much faster two threads hash the same bytes than one: what a second processor adds, 1.0 to 2.0."""

    def spend(rounds: int) -> None:
        for _ in range(rounds):
            hashlib.sha256(block).digest()

    block, times = bytes(1 << 20), {1: [], 2: []}  # type: tuple[bytes, dict[int, list[float]]]
    for threads in (1, 2) * 3:
        working = [threading.Thread(target=spend, args=(200 // threads,)) for _ in range(threads)]
        began = time.perf_counter()
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
        times[threads].append(time.perf_counter() - began)
    return min(times[1]) / min(times[2])


def _print_cores(results: list[dict[str, Any]]) -> None:
    """Print of each kind the fastest of three runs: what neighbours on the machine took is no part of it."""
    print(f"\nSHA-256 on two threads does {second_processor():.2f}x the work of one here")
    print(
        f"\nkvhash native, fed by threads, each with engines of its own (the fastest of 3 runs; load "
        f"{os.getloadavg()[0]:.1f})\n"
    )
    print(
        f"{'threads':<10}{'lookups':<18}{'block ops/s':>14}{'/processor s':>14}{'median us':>12}{'p99 us':>10}"
        f"{'seldom us':>12}"
    )
    for threads in (1, 2):
        for asking in (False, True):
            of = [one for one in results if (one["threads"], one["asking"]) == (threads, asking)]
            best = max(of, key=lambda one: float(one["ops_per_s"]))
            when = "while applying" if asking else "afterwards"
            print(
                f"{threads:<10}{when:<18}{best['ops_per_s']:>14,.0f}{best['ops_per_cpu_s']:>14,.0f}"
                f"{best['lookup_us']:>12,.0f}{best['p99_us']:>10,.0f}{best['seldom_us']:>12,.0f}",
                flush=True,
            )


def measure_memory(engines: int, blocks: int) -> dict[str, Any]:
    """Return the bytes that `blocks` blocks take in the native index, spread over `engines` engines."""
    from kvhash.index import ResidencyIndex

    rng = random.Random(2)
    before = _resident()
    index = ResidencyIndex()
    held = 0
    while held < blocks:
        for engine in range(engines):
            chain = [rng.getrandbits(63) for _ in range(_STEP)]
            index.apply_payloads(f"engine-{engine}", [OurPayloads.prepare((engine, True, None, chain))[1]])
        held += engines * _STEP
    if len(index) != held:
        sys.exit(f"the index holds {len(index)} blocks of {held}")
    return {"blocks": held, "bytes_per_block": (_resident() - before) / held}


def _absent(name: str) -> str | None:
    """Return why an index cannot be measured here, or None."""
    if name == "kvhash native":
        try:
            from kvhash import _native
        except ImportError:
            return "the native module is not built"
        if not any("index" in attribute.lower() or "rank" in attribute.lower() for attribute in dir(_native)):
            return "the native module of this build has no index"
    if name == "Dynamo":
        try:
            import dynamo._core  # noqa: F401
        except ImportError:
            return "ai-dynamo-runtime is not installed (pip install ai-dynamo-runtime)"
    if name == "shared":
        import shutil

        try:
            import redis  # noqa: F401
        except ImportError:
            return "redis is not installed (pip install 'kvhash[redis]')"
        if shutil.which("redis-server") is None:
            return "there is no redis-server"
    return None


def _in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = dict(os.environ)
    if name.startswith("kvhash"):
        environment["KVHASH_BACKEND"] = name.split()[1]
    sizes = [str(arguments.engines), str(arguments.blocks), str(arguments.lookups)]
    command = [sys.executable, __file__, "--measure", name, "--engines", sizes[0], "--blocks", sizes[1]]
    command += ["--lookups", sizes[2]]
    if name != "shared":
        return dict(_answer(command, environment))
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "redis.sock")
        options = ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
        server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        try:
            import redis

            client = redis.Redis(unix_socket_path=socket)
            while not _answers(client):
                time.sleep(0.05)
            empty = client.info("memory")["used_memory"]  # type: ignore[index]
            environment["KVHASH_BENCH_REDIS"] = socket
            result = dict(_answer(command, environment))
            used = client.info("memory")["used_memory"] - empty  # type: ignore[index]
            return {**result, "bytes_per_block": used / result["blocks"]}
        finally:
            server.terminate()
            server.wait()


def _answer(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="block operations beyond the shared prompt"
    )
    parser.add_argument("--lookups", type=int, default=51)
    parser.add_argument("--only", action="append", choices=_NAMES, help="measure only these; repeat")
    parser.add_argument(
        "--memory-blocks", type=int, default=10_000_000, help="blocks held in the measurement of memory"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure == "cores":
        print(json.dumps(measure_cores(arguments.engines, arguments.blocks, arguments.lookups)))
        return
    if arguments.measure == "memory":
        print(json.dumps(measure_memory(arguments.engines, arguments.blocks)))
        return
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.engines, arguments.blocks, arguments.lookups)))
        return
    print(
        f"{arguments.engines} engines, lookups of {PROMPT_BLOCKS} blocks over all of them, "
        f"{os.cpu_count()} processors, python {sys.version.split()[0]}\n"
    )
    print(f"{'index':<15}{'block ops/s':>14}{'ratio':>8}{'lookup us':>12}{'ratio':>8}{'bytes/block':>13}")
    base: dict[str, Any] | None = None
    for name in arguments.only or _NAMES:
        absent = _absent(name)
        if absent is not None:
            print(f"{name:<15}{absent}")
            continue
        found = _in_a_process(name, arguments)
        base = found if name == "dict" else base
        faster = base["lookup_us"] / found["lookup_us"] if base else float("nan")
        rate = found["ops_per_s"] / base["ops_per_s"] if base else float("nan")
        print(
            f"{name:<15}{found['ops_per_s']:>14,.0f}{rate:>7.2f}x{found['lookup_us']:>12,.0f}{faster:>7.1f}x"
            f"{found['bytes_per_block']:>13,.0f}",
            flush=True,
        )
    if arguments.only is not None or _absent("kvhash native") is not None:
        return
    environment = {**os.environ, "KVHASH_BACKEND": "native"}
    command = [sys.executable, __file__, "--engines", str(arguments.engines)]
    command += ["--lookups", str(arguments.lookups)]
    _print_cores(_answer([*command, "--measure", "cores", "--blocks", str(arguments.blocks)], environment))
    memory = _answer([*command, "--measure", "memory", "--blocks", str(arguments.memory_blocks)], environment)
    print(f"\n{memory['blocks']:,} blocks held: {memory['bytes_per_block']:.0f} bytes a block and engine")


if __name__ == "__main__":
    main()
