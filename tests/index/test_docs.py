"""The example in docs/index.md runs and says what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvhash import BlockHasher
from kvhash.events.publisher import Publisher

from .build import batch, stored

PAGE = (Path(__file__).parents[2] / "docs" / "index.md").read_text()


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a live publisher, with its endpoints in place of the page's."""
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    tokens = list(range(64))
    hashes = BlockHasher(vllm="0.33.0", algorithm="sha256", block_size=16).chain(tokens).external()
    with Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        publisher.publish(batch(stored(hashes, size=16, token_ids=tuple(tokens))))
        assert publisher.replay_endpoint is not None
        code = code.replace("tcp://127.0.0.1:5557", publisher.endpoint)
        code = code.replace("tcp://127.0.0.1:5558", publisher.replay_endpoint)
        names: dict[str, Any] = {"tokens": tokens}
        exec(compile(code, "docs/index.md", "exec"), names)
    assert names["match"].usable_tokens == 48
    assert names["index"].knowledge("engine-0").exact
    assert capsys.readouterr().out.startswith("48 {'GPU': 4} Knowledge(state=<State.EXACT")


def test_the_page_names_every_reason_setting_and_count() -> None:
    """A reason, a setting, or one of the statistics that the page does not explain fails here."""
    from kvhash.index import REASONS, EngineSettings, ResidencyIndex

    for name in (*REASONS, *EngineSettings.__dataclass_fields__, *ResidencyIndex().stats()):
        if name not in ("store-unreachable",):  # docs/scale.md
            assert f"`{name}`" in PAGE, name
