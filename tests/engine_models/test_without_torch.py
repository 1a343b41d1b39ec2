"""The engine without a model never touches torch, and asking for a model says what to install."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    """Run code in a new process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_other_module_imports_torch() -> None:
    """All of `engine_ref` but `torch_runner` is imported, and torch and transformers are not."""
    names = run(
        "import importlib, pathlib, sys, engine_ref\n"
        "root = pathlib.Path(engine_ref.__path__[0])\n"
        "for file in root.rglob('*.py'):\n"
        "    parts = file.relative_to(root).with_suffix('').parts\n"
        "    if parts[0] != 'torch_runner' and parts[-1] != '__main__':\n"
        "        importlib.import_module('.'.join(('engine_ref', *parts)))\n"
        "print(len([n for n in sys.modules if n.startswith('engine_ref.')]))\n"
        "print([n for n in ('torch', 'transformers') if n in sys.modules])\n"
    ).split("\n")
    assert int(names[0]) > 25
    assert names[1] == "[]"


def test_without_torch_the_error_says_what_to_install() -> None:
    """The typed error names the extra."""
    said = run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from kvhash import KvHashError\n"
        "try:\n"
        "    import engine_ref.torch_runner\n"
        "except KvHashError as error:\n"
        "    print(error.code, error)\n"
    )
    assert said.startswith("missing-dependency")
    assert "kvhash[engine]" in said
