"""Installing the package: with the native module in a wheel for every CPython, and without a Rust toolchain."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import kvhash
from kvhash import _backend

ROOT = Path(__file__).resolve().parents[2]


def _environment(folder: Path, path: str) -> tuple[Path, dict[str, str]]:
    """Return the programs of a fresh environment, and variables with nothing else but `path` to search."""
    venv.create(folder, with_pip=True)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CARGO", "KVHASH", "VIRTUAL_ENV"))
    }
    return folder / "bin", {**variables, "PATH": os.pathsep.join([str(folder / "bin"), path])}


def _run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def _copy(folder: Path) -> Path:
    """Return a copy of the sources, without what was built in place."""
    names = (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "sdk/python",
        "sdk/rust",
        "cli",
        "engine_ref",
        "vectors",
    )
    for name in names:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            leave = shutil.ignore_patterns("target", "*.so", "__pycache__", "*.egg-info")
            shutil.copytree(source, target, ignore=leave)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def test_a_missing_native_module_is_told_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvhash --version` says once how to get it; not where it is there, nor where Python was chosen."""
    from kvhash_cli.entry import version_text

    monkeypatch.delenv("KVHASH_BACKEND", raising=False)
    monkeypatch.setattr(_backend, "_import", lambda: (None, "No module named 'kvhash._native'"))
    text = version_text("kvhash")
    assert text.startswith(f"kvhash {kvhash.__version__} (backend: python)\n")
    assert text.count("not built") == 1
    assert "install Rust" in text.splitlines()[-1]
    monkeypatch.setenv("KVHASH_BACKEND", "python")
    assert "not built" not in version_text("kvhash")
    monkeypatch.delenv("KVHASH_BACKEND")
    monkeypatch.setattr(_backend, "_import", lambda: (kvhash, ""))
    assert "not built" not in version_text("kvhash")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_installing_without_rust_works_and_is_told(tmp_path: Path) -> None:
    """`pip install .` where no cargo is: the same hashes from pure Python, and the version says what is missing."""
    source = _copy(tmp_path / "source")
    folders = ("/usr/local/bin", "/usr/bin", "/bin")
    path = os.pathsep.join(folder for folder in folders if not Path(folder, "cargo").exists())
    programs, variables = _environment(tmp_path / "env", path)
    assert shutil.which("cargo", path=variables["PATH"]) is None
    _run(programs / "python", "-m", "pip", "install", "--quiet", source, env=variables, cwd=tmp_path)
    shown = _run(programs / "kvhash", "--version", env=variables, cwd=tmp_path)
    assert "(backend: python)" in shown
    assert shown.count("not built") == 1
    code = "import kvhash; print(kvhash.BlockHasher(hash_seed='0').hash_tokens(range(16))[0].hex())"
    expected = kvhash.BlockHasher(hash_seed="0").hash_tokens(range(16))[0]
    assert isinstance(expected, bytes)
    assert _run(programs / "python", "-c", code, env=variables, cwd=tmp_path).strip() == expected.hex()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_passes_the_native_tests_where_no_toolchain_is(tmp_path: Path) -> None:
    """A wheel for every CPython from 3.10 on, tried in a clean environment of this one: `make wheel` tries the rest."""
    if shutil.which("cargo") is None:
        if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
            pytest.fail("cargo is missing, and KVHASH_REQUIRE_ALL=1")
        pytest.skip("cargo is missing; the wheel is NOT tested")
    source = _copy(tmp_path / "source")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source)
    [wheel] = tmp_path.glob("*.whl")
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    shown = _run(
        sys.executable,
        ROOT / "tools" / "check_wheel.py",
        wheel,
        "--python",
        this,
        "--tests",
        "tests/sdk/test_native.py",
    )
    assert f"CPython {this}: passed" in shown
