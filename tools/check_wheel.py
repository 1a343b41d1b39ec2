"""Installs a wheel into a clean environment of every CPython found and runs the SDK's tests there, without Rust.

The wheel must be one for every CPython from 3.10 on (``cp310-abi3``) with the native module, the stub and the test
vectors in it. Each environment has the wheel, its dependencies, the tokenizer extra and what the tests need; no
``cargo`` is on its path, and the native backend is forced.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = range(10, 15)
TEST_NEEDS = ("hypothesis", "jsonschema", "numpy", "pytest", "pytest-timeout")
NEEDED = ("kvhash/_native.abi3.so", "kvhash/_native.pyi", "kvhash/py.typed", "kvhash/vectors/data/")


def faults(wheel: Path) -> list[str]:
    """Return what is wrong with the wheel's name and files."""
    found = []
    if not re.fullmatch(r"kvhash-[^-]+-cp310-abi3-[^-]+\.whl", wheel.name):
        found.append(f"{wheel.name} is not named as a wheel for every CPython from 3.10 on")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found += [f"{name} is missing" for name in NEEDED if not any(file.startswith(name) for file in names)]
    return found


def pythons() -> dict[str, Path]:
    """Return the interpreters found, by their minor version: on the path and in pyenv's folder."""
    found: dict[str, Path] = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *versions.glob(f"*/bin/{name}")]
        for candidate in filter(None, candidates):
            # A shim of a version that is not chosen is on the path and does not run.
            done = subprocess.run([candidate, "-m", "venv", "--help"], capture_output=True, check=False)
            if done.returncode == 0:
                found[f"3.{minor}"] = Path(candidate)
                break
    return found


def clean_path(environment: Path) -> str:
    """Return a search path with the environment's programs and the system's, but without cargo."""
    kept = [folder for folder in ("/usr/local/bin", "/usr/bin", "/bin") if not Path(folder, "cargo").exists()]
    return os.pathsep.join([str(environment / "bin"), *kept])


def try_in(python: Path, wheel: Path, tests: list[str]) -> bool:
    """Install the wheel with this interpreter and run the tests; whether all is well."""
    with tempfile.TemporaryDirectory(prefix="kvhash-wheel-") as folder:
        place = Path(folder) / "env"
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CARGO"))},
            "PATH": clean_path(place),
            "KVHASH_BACKEND": "native",
            "KVHASH_REQUIRE_ALL": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

        def run(*command: str | Path) -> bool:
            return subprocess.run([*map(str, command)], cwd=ROOT, env=variables, check=False).returncode == 0

        inside = place / "bin" / "python"
        pip = (
            inside,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary",
            ":all:",
        )
        where = (
            "import kvhash, sys; assert kvhash.__file__.startswith(sys.prefix), kvhash.__file__; "
            "assert kvhash.backend() == 'native'"
        )
        return (
            run(python, "-m", "venv", place)
            and run(*pip, f"{wheel.resolve()}[tokenizer]", *TEST_NEEDS)
            and run(inside, "-c", where)
            and run(place / "bin" / "kvhash", "--version")
            and run(
                inside,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not long and not interop",
                *tests,
            )
        )


def main() -> None:
    """Check the wheel; exits with 1 where anything is wrong, with 2 where no interpreter was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--python", action="append", help="only this minor version, such as 3.12; may be repeated"
    )
    parser.add_argument(
        "--tests", nargs="*", default=["tests/sdk"], help="what to run there; default tests/sdk"
    )
    arguments = parser.parse_args()
    wrong = faults(arguments.wheel)
    for fault in wrong:
        print(f"{arguments.wheel.name}: {fault}", file=sys.stderr)
    found = {
        name: path for name, path in pythons().items() if not arguments.python or name in arguments.python
    }
    if not found:
        print("no CPython from 3.10 to 3.14 was found", file=sys.stderr)
        sys.exit(2)
    results = {}
    for name, path in found.items():
        print(f"== CPython {name} ({path})", flush=True)
        results[name] = not wrong and try_in(path, arguments.wheel, arguments.tests)
    for name, good in results.items():
        print(f"CPython {name}: {'passed' if good else 'FAILED'}")
    wanted = arguments.python or [f"3.{minor}" for minor in MINORS]
    missing = [name for name in wanted if name not in results]
    if missing:
        print(f"not tried, as not found here: {', '.join(missing)}")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
