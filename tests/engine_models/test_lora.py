"""LoRA adapters in PEFT's format: several in one step, each request with its own, each with its own blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhash import KvHashError

from .engine import make_engine
from .models import ModelShelf, prompts

pytestmark = pytest.mark.torch


def write_adapter(
    folder: Path, seed: int, *, targets: tuple[str, ...], rank: int = 4, **options: Any
) -> Path:
    """Write a random adapter for the tiny Llama, as PEFT saves it, and return its folder."""
    import torch
    from safetensors.torch import save_file

    shapes = {"q_proj": (32, 32), "v_proj": (16, 32), "o_proj": (32, 32), "down_proj": (32, 48)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for target in targets:
            outputs, inputs = shapes[target]
            part = "mlp" if target == "down_proj" else "self_attn"
            path = f"base_model.model.model.layers.{layer}.{part}.{target}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "base_model_name_or_path": "tiny",
        **options,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three adapters of different ranks and targets."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "sql": write_adapter(root / "sql", 1, targets=("q_proj", "v_proj")),
        "law": write_adapter(root / "law", 2, targets=("q_proj", "o_proj", "down_proj"), rank=2),
        "med": write_adapter(root / "med", 3, targets=("v_proj",), rank=8, use_rslora=True),
    }


def expected(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return what a model generates."""
    import torch

    mask = torch.ones(1, len(prompt), dtype=torch.long)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@pytest.mark.parametrize("options", [{}, {"budget": 17, "num_blocks": 60}, {"drafts": 2}], ids=str)
def test_a_batch_of_adapters_gives_each_its_tokens(
    shelf: ModelShelf, adapters: dict[str, Path], options: dict[str, Any]
) -> None:
    """Requests of three adapters and of none, mixed in every step, get the tokens of merged weights."""
    peft = pytest.importorskip("peft") if not _peft_required() else __import__("peft")
    from transformers import AutoModelForCausalLM

    folder = shelf.folder("llama")
    engine = make_engine(folder, runner_options={"adapters": adapters}, **options)
    asked = prompts(12, seed=6)
    names = [None, *adapters]
    requests = [
        engine.request(
            f"r{i}",
            prompt,
            lora=None if (name := names[i % 4]) is None else {"name": name, "path": str(adapters[name])},
            max_tokens=8,
        )
        for i, prompt in enumerate(asked)
    ]
    engine.run(*requests)
    models: dict[str | None, Any] = {None: shelf.reference("llama")}
    for name, adapter in adapters.items():
        base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        models[name] = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()
    differ = 0
    for i, (request, prompt) in enumerate(zip(requests, asked, strict=True)):
        right = expected(models[names[i % 4]], prompt, 8)
        assert request.output_token_ids == right, names[i % 4]
        differ += right != expected(models[None], prompt, 8)
    assert differ >= 8, "the adapters change nothing, so the test shows nothing"


def _peft_required() -> bool:
    import os

    return os.environ.get("KVHASH_REQUIRE_TORCH") == "1"


def test_adapters_never_share_blocks(shelf: ModelShelf, adapters: dict[str, Path]) -> None:
    """The same prompt hits what its own adapter computed, and nothing else."""
    engine = make_engine(shelf.folder("llama"), runner_options={"adapters": adapters})
    prompt = prompts(1, seed=8)[0] * 2
    hits = []
    for index, name in enumerate(["sql", "law", None, "sql", None]):
        lora = None if name is None else {"name": name, "path": str(adapters[name])}
        request = engine.request(f"r{index}", prompt, lora=lora, max_tokens=2)
        engine.run(request)
        hits.append(request.num_cached_tokens > 0)
    assert hits == [False, False, False, True, True]


def test_an_unknown_adapter_ends_its_request_only(shelf: ModelShelf, adapters: dict[str, Path]) -> None:
    """The error names what is loaded; the request beside it goes on."""
    engine = make_engine(shelf.folder("llama"), runner_options={"adapters": {"sql": adapters["sql"]}})
    prompt = prompts(1, seed=8)[0]
    bad = engine.request("bad", prompt, lora={"name": "no", "path": "no"})
    with pytest.raises(KvHashError, match="loaded: sql") as caught:
        engine.runner.validate(bad)
    assert caught.value.code == "unknown-adapter"
    good = engine.request("good", prompt)
    engine.run(bad, good)
    assert "no adapter 'no'" in (bad.error or "")
    assert bad.output_token_ids == []
    assert good.output_token_ids == shelf.generated("llama", prompt, 12)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "missing-weights"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "corrupt-weights"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "missing-weights"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"no"), "corrupt-weights"),
        (lambda f: _set(f, use_dora=True), "unsupported-model"),
        (lambda f: _set(f, peft_type="IA3"), "unsupported-model"),
        (lambda f: _set(f, r=0), "unsupported-model"),
        (lambda f: _set(f, modules_to_save=["lm_head"]), "unsupported-model"),
        (lambda f: _rename(f, "layers.0", "layers.9"), "unsupported-model"),
        (lambda f: _rename(f, "layers.0.self_attn.q_proj.lora_B", "layers.0.self_attn.k_proj.lora_B"), ""),
    ],
)
def test_a_bad_adapter_is_refused(shelf: ModelShelf, tmp_path: Path, change: Any, code: str) -> None:
    """Each fault has a code, and what was loaded before stays."""
    from engine_ref.torch_runner import TorchRunner

    folder = write_adapter(tmp_path / "adapter", 1, targets=("q_proj",))
    runner = TorchRunner.load(shelf.folder("llama"), num_blocks=4, adapters={"ok": folder})
    change(folder)
    with pytest.raises(KvHashError) as caught:
        runner.adapters.load("bad", folder)
    assert caught.value.code == (code or "missing-weights")
    assert "bad" not in runner.adapters
    assert "ok" in runner.adapters


def _set(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def _rename(folder: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({key.replace(old, new): tensor for key, tensor in load_file(file).items()}, file)
