"""The public surface: complete, sorted, typed, and light to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvhash
from kvhash import _errors
from kvhash._errors import KvHashError

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(kvhash.__path__, "kvhash.") if not name.endswith("_native")
]


def test_all_is_sorted_and_complete() -> None:
    """Every public name is in ``__all__``, in order, and can be got."""
    assert kvhash.__all__ == sorted(kvhash.__all__)
    for name in kvhash.__all__:
        assert getattr(kvhash, name) is not None
    assert set(kvhash.__all__) <= set(dir(kvhash))
    with pytest.raises(AttributeError):
        kvhash.nothing_of_this_name  # noqa: B018


def test_every_error_has_its_own_code_and_is_public() -> None:
    """The tree of errors is public, and no two classes share a code."""
    classes = [
        value for _, value in inspect.getmembers(_errors, inspect.isclass) if issubclass(value, KvHashError)
    ]
    assert {c.__name__ for c in classes} == set(_errors.__all__)
    assert set(_errors.__all__) <= set(kvhash.__all__)
    codes = [c.code for c in classes]
    assert len(codes) == len(set(codes))
    tree = _errors.__doc__ or ""
    for c in classes:
        assert c.__name__ in tree


@pytest.mark.parametrize("name", MODULES)
def test_module_docstrings_and_all(name: str) -> None:
    """Each module says in its first line what it promises, and what it lists exists."""
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), name
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.{public}"


def test_only_the_contract_knows_release_numbers() -> None:
    """No other module compares or names a vLLM release in code: a new release is a row of one table."""
    root = Path(kvhash.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if (
            path.name == "contract.py" or path.parent.name == "vectors"
        ):  # the corpus names releases as its data
            continue
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words = node.value.split()
                if len(words) == 1 and words[0].count(".") == 2 and words[0].replace(".", "").isdigit():
                    found.append((path.name, node.lineno, node.value))
    assert [hit for hit in found if hit[0] != "_version.py"] == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    """``import kvhash`` loads no dependency; hashing loads no transformers, torch or NumPy."""
    code = (
        "import sys, kvhash; before = set(sys.modules); kvhash.BlockHasher(block_size=4).hash_tokens([1, 2, 3, 4]);"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules);"
        "print(sorted({'xxhash', 'json'} & before), sorted(heavy))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[] []"
