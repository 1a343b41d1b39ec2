"""Line programs for the tests: the SDK's own, copies of it with a mistake, and ones that behave badly."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SDK = ROOT / "sdk" / "python"
CORPUS = ROOT / "vectors"
DATA = ROOT / "tests" / "data"

_ANSWER = """
import json, os, sys, warnings
os.environ.update({environment!r})
sys.path.insert(0, {sdk!r})
warnings.simplefilter("ignore")
from kvhash.events.lines import answer_all_lines
for answer in answer_all_lines(sys.stdin.buffer):
    print(json.dumps(answer, ensure_ascii=False, separators=(",", ":")), flush=True)
"""


def python(source: str) -> str:
    """Return the command line that runs `source`."""
    return shlex.join([sys.executable, "-X", "utf8", "-c", source])


def sdk_program(sdk: Path = SDK) -> str:
    """Return the command line of a program that answers as the SDK in this folder does."""
    # A changed copy is Python; the native core knows nothing of the change.
    environment = {} if sdk == SDK else {"KVHASH_BACKEND": "python"}
    return python(_ANSWER.format(sdk=str(sdk), environment=environment))


def changed_sdk(folder: Path, changes: list[tuple[str, str, str]]) -> Path:
    """Copy the SDK's code and replace text in it: (file, old, new); every old text must be there."""
    target = folder / "sdk"
    shutil.copytree(
        SDK / "kvhash",
        target / "kvhash",
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "data"),
        copy_function=os.link,
    )
    for name, old, new in changes:
        path = target / "kvhash" / name
        text = path.read_text()
        assert old in text, f"{name} does not hold {old!r} any more; the mutation is to be written anew"
        path.unlink()  # it is a link to the real file
        path.write_text(text.replace(old, new))
    return target
