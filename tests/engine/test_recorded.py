"""The engine against recordings of vLLM: cache operations, scheduler workloads, and a server's own events."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request
from engine_ref.runner import ScriptedRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec
from engine_ref.trace import play_trace
from engine_ref.trace_scheduler import play_run
from kvhash import BlockHasher, InvalidRequestError

DATA = Path(__file__).parent.parent / "data"
CAPTURES = sorted((DATA / "captures").glob("vllm-*.json"))


@cache
def recording(name: str) -> Any:
    """Return a gzipped recording."""
    return json.loads(gzip.decompress((DATA / "engine" / name).read_bytes()))


def label(item: dict[str, Any]) -> str:
    """Name a trace or run in the test's id."""
    return f"{item['seed']}-{item.get('name', '-'.join(group['kind'] for group in item.get('groups', ())))}"


TRACES = recording("cache_traces.json.gz")["traces"] + recording("cache_traces_special.json.gz")["traces"]
RUNS = recording("scheduler_traces.json.gz")["runs"]


@pytest.mark.parametrize("trace", TRACES, ids=label)
def test_cache_trace_is_reproduced(trace: dict[str, Any]) -> None:
    """Hits, block ids, refusals, events, free counts and the final free queue are those of vLLM's manager."""
    blind = trace | {"ops": [_inputs(op) for op in trace["ops"]]}
    blind.pop("final_free_queue")
    observed = play_trace(blind)
    for index, (theirs, ours) in enumerate(zip(trace["ops"], observed["ops"], strict=True)):
        assert ours == theirs, f"operation {index}"
    assert observed["final_free_queue"] == trace["final_free_queue"]


def _inputs(op: dict[str, Any]) -> dict[str, Any]:
    return {key: op[key] for key in ("op", "id", "tokens", "salt", "append", "num_new_tokens") if key in op}


@pytest.mark.parametrize("run", RUNS, ids=label)
def test_scheduler_run_is_reproduced(run: dict[str, Any]) -> None:
    """Every step plans, samples, publishes and frees what vLLM's scheduler did."""
    blind = run | {
        "steps": [{key: step[key] for key in ("step", "added", "drafts")} for step in run["steps"]]
    }
    blind.pop("final_free_queue")
    observed = play_run(blind)
    for theirs, ours in zip(run["steps"], observed["steps"], strict=True):
        for key in theirs.keys() - {"sampled", "batches"}:
            assert ours[key] == theirs[key], f"step {theirs['step']}: {key}"
        assert list(ours["num_scheduled_tokens"]) == list(theirs["num_scheduled_tokens"])
        assert {k: v for k, v in ours["sampled"].items() if v} == {
            k: v for k, v in theirs["sampled"].items() if v
        }
    assert observed["final_free_queue"] == run["final_free_queue"]


def wire_events(payload: bytes) -> list[dict[str, Any]]:
    """Decode a batch and keep what is the engine's, not the wire shape's: hashes, parent, tokens, size, group."""
    return [_comparable(event) for event in msgspec.msgpack.decode(payload)[1]]


def _comparable(event: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "block_hashes parent_block_hash token_ids block_size medium lora_id lora_name extra_keys "
        "group_idx kv_cache_spec_kind"
    )
    return {"type": event["type"]} | {key: event[key] for key in keys.split() if event.get(key) is not None}


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_capture_is_republished(path: Path) -> None:
    """The requests of a real server, sent again, give its BlockStored and BlockRemoved, batch for batch.

    The server ran without async scheduling: with it, a block that output tokens fill is published a step later than
    the block of the next placeholder is taken, and the three captures that evict while they decode differ.
    """
    capture = json.loads(path.read_bytes())
    theirs = [wire_events(bytes.fromhex(frame[2])) for frame in capture["frames"]]
    assert replay(capture, async_scheduling=False) == theirs
    if "lora" not in capture:
        assert replay(capture, async_scheduling=True) != theirs


def replay(capture: dict[str, Any], *, async_scheduling: bool) -> list[list[dict[str, Any]]]:
    """Send a capture's requests one after the other and return the batches."""
    size = capture["block_size"]
    hasher = BlockHasher(
        vllm="0.32.0", algorithm=capture["algo"], hash_seed=capture["hash_seed"], block_size=size
    )
    raw = any(
        isinstance(value, bytes)
        for frame in capture["frames"]
        for event in msgspec.msgpack.decode(bytes.fromhex(frame[2]))[1]
        for value in event.get("block_hashes", ())
    )
    config = SchedulerConfig(
        cache=CacheConfig(
            groups=(FullAttentionSpec(block_size=size),),
            num_blocks=64,
            hash_block_size=size,
            scheduler_block_size=size,
            max_model_len=1024,
            event_hash_form="bytes" if raw else "uint64",
        ),
        async_scheduling=async_scheduling,
    )
    batches: list[list[dict[str, Any]]] = []

    def publish(events: Sequence[KVEvent]) -> None:
        batches.append([_comparable(msgspec.msgpack.decode(msgspec.msgpack.encode(e))) for e in events])

    sent = {str(i): record for i, record in enumerate(capture["requests"])}
    core = EngineCore(
        config, ScriptedRunner({i: r["out"] for i, r in sent.items() if "prompt" in r}), publish=publish
    )
    for request_id, record in sent.items():
        if "prompt" not in record:
            assert core.reset_prefix_cache()
            continue
        core.add_request(
            Request(
                request_id,
                record["prompt"],
                hasher=hasher,
                max_tokens=record["max_tokens"],
                cache_salt=record.get("cache_salt"),
                lora=capture["lora"] if record.get("model") else None,
            )
        )
        while core.has_work:
            core.step()
    return batches


def run_trace(data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run the command on standard input."""
    return subprocess.run(
        [sys.executable, "-m", "engine_ref", "trace", "-"], input=data, capture_output=True, check=False
    )


def test_trace_command_answers_in_the_same_form() -> None:
    """The command writes the observations of each trace as JSON to stdout."""
    done = run_trace(json.dumps({"traces": TRACES[:1]}).encode())
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["traces"][0]
    assert answer["ops"] == TRACES[0]["ops"]
    assert answer["final_free_queue"] == TRACES[0]["final_free_queue"]


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b"{", 4, b"is not JSON"),
        (b"[]", 2, b"expected an object"),
        (b'{"traces":[{"groups":[{"kind":"ring","block_size":4}]}]}', 2, b"$.traces[0].groups[0].kind"),
        (b'{"traces":[{"groups":[{"kind":"full_attention"}]}]}', 2, b"$.traces[0].groups[0]"),
        (b'{"traces":[{}]}', 2, b"$.traces[0]"),
        (b'{"runs":[7]}', 2, b"$.runs[0]"),
    ],
)
def test_trace_command_refuses_what_it_cannot_play(data: bytes, code: int, says: bytes) -> None:
    """A bad recording gives one line that says what and where, nothing on stdout, no traceback."""
    done = run_trace(data)
    assert (done.returncode, done.stdout) == (code, b"")
    assert says in done.stderr
    assert b"Traceback" not in done.stderr


_DELETE = object()


def _changed(record: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy with one value, deep inside, replaced or taken out."""
    copy = json.loads(json.dumps(record))
    inside = copy
    for step in path[:-1]:
        inside = inside[step]
    if value is _DELETE:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return copy


def _place(path: tuple[str | int, ...]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


_STEP = next(i for i, op in enumerate(TRACES[0]["ops"]) if op.get("append"))
_FREE = next(i for i, op in enumerate(TRACES[0]["ops"]) if op["op"] == "free")
_ADDED = next(i for i, step in enumerate(RUNS[0]["steps"]) if step["added"])


_PARTS: dict[str, list[tuple[str | int, ...]]] = {
    "traces": [
        ("ops",),
        ("ops", 0),
        ("ops", 0, "op"),
        ("ops", 0, "id"),
        ("ops", 0, "tokens"),
        ("ops", 0, "tokens", 3),
        ("ops", 0, "num_new_tokens"),
        ("ops", _STEP, "append"),
        ("ops", _STEP, "append", 0),
        ("ops", _STEP, "num_new_tokens"),
        ("ops", _FREE, "id"),
        ("groups",),
        ("groups", 0),
        ("groups", 0, "block_size"),
        ("num_blocks",),
        ("hash_block_size",),
        ("scheduler_block_size",),
        ("use_eagle",),
        ("algo",),
    ],
    "runs": [
        ("steps",),
        ("steps", 1),
        ("steps", _ADDED, "added"),
        ("steps", _ADDED, "added", 0),
        ("steps", 1, "drafts"),
        ("requests",),
        ("requests", 0),
        ("requests", 0, "id"),
        ("requests", 0, "prompt"),
        ("requests", 0, "prompt", 1),
        ("requests", 0, "outputs", 1),
        ("requests", 0, "max_tokens"),
        ("config",),
        ("config", "block_size"),
        ("config", "num_blocks"),
        ("config", "policy"),
        ("config", "async_scheduling"),
    ],
}


@pytest.mark.parametrize("value", [5, None, "x", [{}]], ids=str)
@pytest.mark.parametrize("kind", ["traces", "runs"])
def test_a_recording_that_is_no_object_is_named(kind: str, value: Any) -> None:
    """A trace or run that is a number, a text or a list is said to be none."""
    with pytest.raises(InvalidRequestError, match="expected an object, got") as caught:
        (play_trace if kind == "traces" else play_run)(value, at=f"$.{kind}[3]")
    assert caught.value.at == f"$.{kind}[3]"


@pytest.mark.parametrize(
    "value", [None, -5.5, {1.5: 1}, _DELETE], ids=["null", "number", "object", "nothing"]
)
@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in _PARTS.items() for path in paths])
def test_a_wrong_part_of_a_recording_is_named_with_its_place(
    kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    """Whatever part is missing or of another type, the error says where in the file, in no words of Python's."""
    if (value is _DELETE and isinstance(path[-1], int)) or path == ("use_eagle",):
        value = "x"  # what may be absent, or is one of many, can only be wrong
    data = _changed((TRACES if kind == "traces" else RUNS)[0], path, value)
    with pytest.raises(InvalidRequestError) as caught:
        (play_trace if kind == "traces" else play_run)(data, at=f"$.{kind}[3]")
    place = f"$.{kind}[3]{_place(path)[1:]}"
    inside = caught.value.at or ""
    assert inside.startswith(place) or (value is _DELETE and place.startswith(f"{inside}."))
    assert "object is not" not in str(caught.value)
