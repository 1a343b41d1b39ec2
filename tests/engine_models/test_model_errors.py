"""What is wrong with a model is said before the engine starts; what goes wrong in a step ends its request only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine_ref.loop import EngineLoop
from engine_ref.report import Output, StepReport
from engine_ref.request import RequestStatus
from kvhash import KvHashError

from .engine import make_engine
from .models import ModelShelf, prompts

pytestmark = pytest.mark.torch


def set_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def drop_tensor(folder: Path) -> None:
    """Leave a tensor out of the weights."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    """Cut the weights in the middle."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FAULTS: dict[str, tuple[Any, str, str]] = {
    "no folder": (shutil.rmtree, "model-error", "could not be fetched"),
    "no config": (lambda f: (f / "config.json").unlink(), "model-error", "config.json is not there"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "model-error", "not a model's"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "model-error", "not a model's"),
    "config is wrong": (lambda f: set_config(f, hidden_size="big"), "model-error", "not a valid config"),
    "unknown family": (lambda f: set_config(f, model_type="bert"), "unknown-model-family", "llama, mistral"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing-weights", "is not there"),
    "a tensor is missing": (drop_tensor, "missing-weights", "layers.1.mlp.up_proj"),
    "truncated": (truncate, "corrupt-weights", "cannot be read"),
    "no safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 64),
        "corrupt-weights",
        "cannot be read",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "corrupt-weights", "cannot be read"),
    "bad index": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        "corrupt-weights",
        "not an index",
    ),
    "index names a missing file": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "missing-weights",
        "b.safetensors is not there",
    ),
    "weights of another shape": (lambda f: set_config(f, intermediate_size=64), "model-error", "cannot be"),
    "rotary depends on the batch": (
        lambda f: set_config(
            f, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
        "unsupported-model",
        "dynamic",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_is_refused(
    shelf: ModelShelf, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault has its code and says what is wrong."""
    from engine_ref.torch_runner import load_model

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    change, code, words = FAULTS[fault]
    folder = tmp_path / "model"
    shutil.copytree(shelf.folder("llama"), folder)
    change(folder)
    with pytest.raises(KvHashError) as caught:
        load_model(folder)
    assert caught.value.code == code
    assert words in str(caught.value)


def test_settings_that_cannot_be_are_refused(shelf: ModelShelf) -> None:
    """Dtype, attention, and drafts where a state cannot go back."""
    from engine_ref.ngram import NgramDrafter
    from engine_ref.torch_runner import TorchRunner

    def refused(name: str, **options: Any) -> str:
        with pytest.raises(KvHashError) as caught:
            TorchRunner.load(shelf.folder(name), num_blocks=4, **options)
        assert caught.value.code == "unsupported-model"
        return str(caught.value)

    assert "float32, bfloat16" in refused("llama", dtype="float16")
    assert "plain or triton" in refused("llama", attention="fast")
    assert "CUDA" in refused("llama", attention="triton")
    assert "recurrent" in refused("qwen3_5", drafter=NgramDrafter(2))


def test_a_model_without_tokenizer_says_so(shelf: ModelShelf) -> None:
    """The error names the folder."""
    from engine_ref.torch_runner import load_model

    with pytest.raises(KvHashError, match="tokenizer"):
        load_model(shelf.folder("llama")).load_tokenizer()


def test_a_request_with_images_ends_alone(shelf: ModelShelf) -> None:
    """A text model would compute an image's tokens as text; it is said instead, and others go on."""
    engine = make_engine(shelf.folder("llama"))
    image = {"identifier": "a1", "offset": 2, "length": 4}
    bad = engine.request("bad", range(10), multimodal=[image])
    with pytest.raises(KvHashError, match="no images") as caught:
        engine.runner.validate(bad)
    assert caught.value.code == "unsupported-input"
    good = engine.request("good", (1, 2, 3))
    engine.run(bad, good)
    assert bad.status is RequestStatus.FINISHED_ERROR
    assert good.output_token_ids == shelf.generated("llama", (1, 2, 3), 12)


def broken_embeddings(engine: Any, length: int, at: int) -> Any:
    """Return embeddings for a prompt of which one row is no number."""
    import torch

    rows = torch.zeros(length, engine.runner.loaded.config.hidden_size)
    rows[:, 0] = torch.arange(length) + 1.0
    rows[at] = float("nan")
    return rows


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("options", [{}, {"budget": 9}, {"async_scheduling": True}], ids=str)
def test_nan_ends_its_request_and_leaves_no_trace(
    shelf: ModelShelf, name: str, options: dict[str, Any]
) -> None:
    """The request gets an error, its blocks cannot be hit, and who gets its pages next is right."""
    engine = make_engine(shelf.folder(name), num_blocks=48, **options)
    asked = prompts(8, seed=12)
    rows = broken_embeddings(engine, 45, 21)
    alone = engine.request("alone", [0] * 45, prompt_embeds=rows)
    engine.run(alone)
    left = [part.isnan().any() for layer in engine.runner.cache.layers.values() for part in layer.parts()]
    assert any(left), "the test leaves no trace to be seen"
    bad = engine.request("bad", [0] * 45, prompt_embeds=rows)
    good = [engine.request(f"g{i}", prompt) for i, prompt in enumerate(asked)]
    engine.run(bad, *good)
    found = engine.core.scheduler.cache.pool.cached_keys
    for request in (alone, bad):
        assert request.status is RequestStatus.FINISHED_ERROR
        assert "NaN" in (request.error or "")
        assert request.output_token_ids == []
        assert request.num_cached_tokens == 0
        assert len(request.block_hashes) == 11
        assert not any(key[:-4] in request.block_hashes for key in found)
    for request, prompt in zip(good, asked, strict=True):
        assert request.output_token_ids == shelf.generated(name, prompt, 12)
    # Its pages are handed out again, and again.
    assert engine.outputs(asked * 3, waves=3) == [shelf.generated(name, prompt, 12) for prompt in asked] * 3
    assert engine.core.scheduler.cache.pool.usage == 0.0


def test_the_loop_stays_up_after_a_failed_request(shelf: ModelShelf) -> None:
    """A listener hears of the error, and the next request is served."""
    import queue

    engine = make_engine(shelf.folder("llama"))
    heard: queue.Queue[StepReport] = queue.Queue()
    loop = EngineLoop(engine.core, heard.put)
    loop.start()
    bad = engine.request("bad", [0, 0], prompt_embeds=broken_embeddings(engine, 2, 1))
    good = engine.request("good", [1, 2], max_tokens=2)
    for request, status in (
        (bad, RequestStatus.FINISHED_ERROR),
        (good, RequestStatus.FINISHED_LENGTH_CAPPED),
    ):
        loop.submit(request)
        outputs: list[Output] = []
        while not any(output.finish_reason for output in outputs):
            outputs += heard.get(timeout=30).outputs
        assert [output.request_id for output in outputs if output.finish_reason] == [request.request_id]
        assert request.status is status
    assert loop.alive
    assert loop.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_leaves_only_true_blocks(shelf: ModelShelf, async_scheduling: bool) -> None:
    """A prompt aborted with its chunk in flight was announced as cached: who hits it must find it computed."""
    engine = make_engine(shelf.folder("llama"), budget=24, async_scheduling=async_scheduling)
    prompt = prompts(1, seed=14)[0] * 3
    for steps in range(1, 6):
        request = engine.request(f"a{steps}", [steps, *prompt])
        engine.core.add_request(request)
        for _ in range(steps):
            engine.core.step()
        engine.core.abort([request.request_id])
        again = engine.request(f"b{steps}", [steps, *prompt])
        engine.run(again)
        assert again.output_token_ids == shelf.generated("llama", (steps, *prompt), 12)
        assert again.num_cached_tokens > 0
