"""A bounded run of each fuzzer, from real messages on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhash.events import RecordingWriter

from ..data_files import CAPTURES, capture

HERE = Path(__file__).parent
SECONDS = 45


def _seeds(name: str, folder: Path) -> None:
    for number, frame in enumerate(frame for which in CAPTURES for frame in capture(which)["frames"][:20]):
        payload = bytes.fromhex(frame[2])
        if name == "fuzz_decode":
            (folder / f"seed-{number}").write_bytes(payload)
        else:
            with RecordingWriter(folder / f"seed-{number}") as writer:
                for seq in range(2):
                    writer.write(
                        (b"kv", seq.to_bytes(8, "big"), payload), endpoint="tcp://127.0.0.1:1", received_ns=1
                    )
            (folder / f"seed-{number}.idx").unlink()


@pytest.mark.long
@pytest.mark.parametrize("name", ["fuzz_decode", "fuzz_recording"])
def test_no_input_breaks_a_reader(name: str, tmp_path: Path) -> None:
    """Inputs grown by coverage from real ones give no error but the typed ones, and no wrong reading."""
    if importlib.util.find_spec("atheris") is None:
        if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
            pytest.fail("atheris is not installed")
        pytest.skip("atheris is not installed; install it with: pip install atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    _seeds(name, corpus)
    ran = subprocess.run(
        [
            sys.executable,
            str(HERE / f"{name}.py"),
            str(corpus),
            f"-max_total_time={SECONDS}",
            "-max_len=8192",
            "-timeout=10",
            "-seed=1",
            f"-artifact_prefix={tmp_path}/",
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "Done " in ran.stderr, ran.stderr[-2000:]
