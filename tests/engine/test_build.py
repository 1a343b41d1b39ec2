"""What an engine is made of follows from the model folder and the flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_ref import build
from engine_ref.model_info import ModelInfo
from engine_ref.runner import NullRunner
from engine_ref.spec import FullAttentionSpec, SlidingWindowSpec
from kvhash import KvHashError

from .running import ROOT, small_options


def folder(path: Path, *, weights: bool = False, **config: Any) -> str:
    """Make a model folder."""
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return str(path)


def test_config_gives_vocabulary_lengths_and_groups(tmp_path: Path) -> None:
    """The folder's configuration, a nested text one too, decides what can be read before a model is loaded."""
    text = {"vocab_size": 500, "max_position_embeddings": 77, "eos_token_id": [2, 3], "num_hidden_layers": 2}
    info = ModelInfo.read(folder(tmp_path, text_config=text))
    assert (info.vocab_size, info.max_model_len, info.eos_token_id) == (500, 77, 2)
    assert info.groups(16) == (FullAttentionSpec(block_size=16),)
    assert ModelInfo.read("only-a-name") == ModelInfo()


def test_layers_of_two_kinds_are_packed_as_vllm_packs_them(tmp_path: Path) -> None:
    """Five sliding layers to a full one are six groups; all sliding ones are one; a window not used is none."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    mixed = ModelInfo.read(folder(tmp_path, layer_types=kinds, sliding_window=64, num_hidden_layers=6))
    window = SlidingWindowSpec(block_size=4, sliding_window=64)
    assert sorted(spec.kind for spec in mixed.groups(4)) == ["full_attention"] + ["sliding_window"] * 5
    sliding = ModelInfo.read(folder(tmp_path, sliding_window=64, num_hidden_layers=6))
    assert sliding.groups(4) == (window,)
    config = {"sliding_window": 64, "use_sliding_window": False, "num_hidden_layers": 6}
    assert ModelInfo.read(folder(tmp_path, **config)).groups(4) == (FullAttentionSpec(block_size=4),)


def test_bad_config_is_a_typed_error(tmp_path: Path) -> None:
    """A folder whose configuration cannot be read is said."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KvHashError, match="no model configuration"):
        ModelInfo.read(str(tmp_path))
    with pytest.raises(KvHashError, match="no model configuration"):
        ModelInfo.read(folder(tmp_path, vocab_size="many"))


def test_weights_and_torch_make_a_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both the model is loaded with the engine's geometry; else, or as dummy, tokens are made up."""
    asked: dict[str, Any] = {}

    class Loaded:
        @classmethod
        def load(cls, source: str, **options: Any) -> Loaded:
            asked.update(options, source=source)
            return cls()

    module = ModuleType("engine_ref.torch_runner")
    module.TorchRunner = Loaded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_ref.torch_runner", module)
    found = {"torch": True}
    monkeypatch.setattr(
        build.importlib.util, "find_spec", lambda name: SimpleNamespace() if found[name] else None
    )
    model = folder(tmp_path, weights=True)
    options = small_options(model=model, adapters={"sql": "adapters/sql"}, dtype="bfloat16")
    assert isinstance(build.make_runner(options), Loaded)
    assert asked == {
        "source": model,
        "num_blocks": options.num_gpu_blocks,
        "block_size": options.block_size,
        "dtype": "bfloat16",
        "device": "cpu",
        "graphs": None,
        "adapters": {"sql": "adapters/sql"},
        "drafter": None,
    }
    build.make_runner(small_options(model=model, enforce_eager=True))
    assert asked["graphs"] == "off"
    assert isinstance(build.make_runner(small_options(model=model, load_format="dummy")), NullRunner)
    found["torch"] = False
    assert isinstance(build.make_runner(options), NullRunner)
    assert isinstance(build.make_runner(small_options()), NullRunner)


WITHOUT_EXTRAS = """
import subprocess
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("prometheus_client", "starlette", "uvicorn", "redis", "transformers", "torch"):
            raise ImportError(name, name=name.split(".")[0])
sys.meta_path.insert(0, Refuse())
from engine_ref.cli import main
sys.exit(main())
"""


def test_without_the_extras_serving_says_what_to_install() -> None:
    """A bare installation records and plays traces; serving ends with exit code 2 and names the extra."""
    for arguments, code, says in (
        (("serve", "m", "--port", "0"), 2, "kvhash[serve]"),
        (("record", "-"), 0, ""),
    ):
        command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
        done = subprocess.run(
            command, input='{"tokens":[1]}', capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == code, done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr
