"""The Triton kernels: interpreted they equal the plain form, compiled for sm_80 and sm_90 they spill no register.

Neither needs a GPU. That they run on one is for `make gpu-check` to show.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

#: Largest error in the output against float64; values are of the order of 1.
CLOSE = {"float32": 2e-6, "float16": 2e-3}


@pytest.fixture(autouse=True)
def _triton() -> None:
    """Skip, loudly, where there is no Triton (it is made for Linux); the engine's own target asks for it."""
    if importlib.util.find_spec("triton") is None:
        message = "triton is not installed: its kernels are not tested"
        if os.environ.get("KVHASH_REQUIRE_TORCH") == "1":
            pytest.fail(message)
        pytest.skip(message)


def test_interpreted_kernels_equal_the_plain_form() -> None:
    """18 random steps: decodes, prompts with and without a prefix, shared heads, windows, soft caps, splits.

    And 4 of decodes in padded buffers, as CUDA graphs have them.

    In bfloat16 the interpreter multiplies bit patterns, so half precision is float16 here.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine_models.kernel_cases", "18", "7"],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 18 + 4
    assert {line["dtype"] for line in lines} == set(CLOSE)
    for line in lines:
        assert line["pages"] == 0.0, line["case"]
        assert line["output"] < CLOSE[line["dtype"]], line["case"]


def compile_for(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Any:
    """Compile a kernel for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(compiled: Any, capability: int, folder: Path) -> int:
    """Assemble the kernel once more with Triton's own ptxas and return what it says of spills."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    said = []
    for tool in ("ptxas", "ptxas-blackwell"):  # the one that knows this version of PTX
        if not (tools / tool).exists():
            continue
        architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
        command = [str(tools / tool), "-v", f"--gpu-name={architecture}", str(ptx), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
        if done.returncode == 0 and found:
            return sum(int(number) for pair in found for number in pair)
        said.append(done.stderr)
    raise AssertionError(said)


POINTERS = {
    "part_output": "*fp32",
    "part_max": "*fp32",
    "part_sum": "*fp32",
    "tables": "*i32",
    "tile_sequences": "*i32",
    "tile_firsts": "*i32",
    "offsets": "*i32",
    "starts": "*i32",
    "counts": "*i32",
    "table_width": "i32",
    "num_tokens": "i32",
    "scale": "fp32",
    "softcap": "fp32",
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "longest", "splits", "window", "softcap"),
    [
        ("bf16", 1, 4, 0, False),
        ("bf16", 64, 1, 0, False),
        ("bf16", 64, 2, 1024, True),
        ("fp32", 1, 1, 0, False),
    ],
)
def test_attention_compiles_without_spills(
    tmp_path: Path, capability: int, dtype: str, longest: int, splits: int, window: int, softcap: bool
) -> None:
    """Decode and prefill of a common shape, 32 heads over 8, 128 wide."""
    from engine_ref.torch_runner.attention_triton import attention_kernel, launch_options, tile_sizes

    size = {"bf16": 2, "fp32": 4}[dtype]
    rows, keys, width = tile_sizes(heads=32, kv_heads=8, size=128, longest=longest, element_size=size)
    tensors = dict.fromkeys(("queries", "key_pages", "value_pages", "output"), f"*{dtype}")
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "SIZE": 128,
        "PAGE": 16,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SPLITS": splits,
        "ROWS": rows,
        "KEYS": keys,
        "WIDTH": width,
    }
    options = launch_options(rows, element_size=size)
    compiled = compile_for(attention_kernel, capability, {**tensors, **POINTERS}, constants, **options)
    assert spilled_bytes(compiled, capability, tmp_path) == 0
    assert compiled.metadata.shared < 160 * 1024  # what a multiprocessor of either can give


@pytest.mark.parametrize("capability", [80, 90])
def test_small_kernels_compile_without_spills(tmp_path: Path, capability: int) -> None:
    """Writing and combining."""
    from engine_ref.torch_runner.attention_triton import combine_kernel, write_kernel

    integers = dict.fromkeys(("row_size", "row_stride", "num_rows"), "i32")
    write = {"new": "*bf16", "pages": "*bf16", "slots": "*i64", **integers}
    parts = {**dict.fromkeys(("part_output", "part_max", "part_sum"), "*fp32"), "output": "*bf16", **integers}
    for kernel, types, constants in (
        (write_kernel, write, {"BLOCK": 1024}),
        (combine_kernel, parts, {"SIZE": 128, "SPLITS": 16, "WIDTH": 128}),
    ):
        compiled = compile_for(kernel, capability, types, constants)
        assert spilled_bytes(compiled, capability, tmp_path) == 0
