"""The native backend and the pure Python definition are told apart by their speed alone."""

from __future__ import annotations

import ast
import os
import random
import sys
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvhash
from kvhash import BlockHasher, Chain, HashRequest, KvHashError, MissingDependencyError, UsageError

from .strategies import TOKENS, requests

CODES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
SETTINGS = ("vllm", "algorithm", "hash_seed", "block_size", "lookahead", "decode_context_parallel_size")
KEYS = ("lora", "cache_salt", "multimodal", "prompt_embeds")


@pytest.fixture(scope="module", autouse=True)
def native() -> Any:
    """Return the native module; without it fail where everything is required, else skip loudly."""
    try:
        from kvhash import _native
    except ImportError:
        if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
            pytest.fail("the native module is not built, and KVHASH_REQUIRE_ALL=1")
        pytest.skip("the native module is not built; it is NOT tested")
    return _native


def _hashers(**options: Any) -> tuple[BlockHasher, BlockHasher]:
    """Return the native and the pure hasher of these settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVHASH_BACKEND", "native")
        native = BlockHasher(**options)
        patch.setenv("KVHASH_BACKEND", "python")
        pure = BlockHasher(**options)
    assert native._engine is not None
    assert pure._engine is None
    assert native == pure
    return native, pure


def _pair(**changes: Any) -> tuple[BlockHasher, BlockHasher]:
    return _hashers(
        **{"vllm": "0.33.0", "algorithm": "sha256_cbor", "block_size": 4, "hash_seed": "0", **changes}
    )


def _seen(chain: Chain) -> dict[str, Any]:
    """Return everything that a chain shows."""
    return {
        "hashes": chain.block_hashes,
        "external": chain.external(),
        "extra_keys": kvhash.request.json_keys(tuple(chain.extra_keys())),
        "event_extra_keys": kvhash.request.json_keys(tuple(chain.event_extra_keys())),
        "num_tokens": chain.num_tokens,
        "blocks": len(chain),
        "view": list(chain.view(chain.hasher.span * 2)),
    }


def _outcome(work: Any, *given: Any) -> Any:
    """Return what a call gives, or the type, code, message and place of its error."""
    try:
        return work(*given)
    except KvHashError as error:
        return type(error), error.code, error.message, error.at


def _compare(request: dict[str, Any], cuts: list[int]) -> None:
    checked = HashRequest.of(request)
    options = {name: request[name] for name in SETTINGS if name in request}
    keys = {name: request[name] for name in KEYS if name in request}
    native, pure = _hashers(**options)
    whole = _seen(checked.chain(pure))
    assert _seen(checked.chain(native)) == whole
    # The same prompt in pieces, with a copy made on the way that goes on by itself.
    tokens = list(checked.tokens)
    places = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    grown, reference = native.chain(**keys), pure.chain(**keys)
    for start, end in pairwise(places):
        twin = grown.copy()
        assert grown.append(tokens[start:end]) == reference.append(tokens[start:end])
        assert grown.num_tokens == reference.num_tokens == end
        twin.append(tuple(tokens[start:end]))
        assert _seen(twin) == _seen(grown)
    assert _seen(grown) == whole


@given(requests(), st.lists(st.integers(0, 60), max_size=5))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_both_backends_answer_alike(request: dict[str, Any], cuts: list[int]) -> None:
    """Random requests of every kind: equal hashes, keys and published forms, at once and in pieces."""
    _compare(request, cuts)


@pytest.mark.long
@pytest.mark.timeout(7200)
@given(requests(), st.lists(st.integers(0, 60), max_size=5))
@settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_both_backends_answer_alike_a_hundred_thousand_times(
    request: dict[str, Any], cuts: list[int]
) -> None:
    """As above, at length."""
    _compare(request, cuts)


@given(st.lists(TOKENS | st.integers(0, (1 << 64) - 1), max_size=80), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_algorithm_hashes_every_token_id_alike(tokens: list[int], block_size: int) -> None:
    """Ids of every width, in blocks of every length, for all algorithms of the newest release and of 0.10.0."""
    for vllm in ("0.33.0", "0.10.0"):
        for algorithm in kvhash.Contract.for_vllm(vllm).algorithms:
            native, pure = _pair(vllm=vllm, algorithm=algorithm, block_size=block_size)
            assert native.hash_tokens(tokens) == pure.hash_tokens(tokens)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("block_size", [3, 4, 4096, 4097, 13_105, 13_108, 70_000])
def test_large_blocks_are_hashed_alike(algorithm: str, block_size: int) -> None:
    """Blocks around the limits of the fast writers and of a pickle frame."""
    native, pure = _pair(algorithm=algorithm, block_size=block_size)
    tokens = [(1 << 31) - 1 - i for i in range(block_size * 2 + 1)]
    assert native.hash_tokens(tokens) == pure.hash_tokens(tokens)


class _Tensor:
    """What a torch tensor on the CPU shows of itself, without torch."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def detach(self) -> _Tensor:
        return self

    def numpy(self) -> Any:
        return self._values

    def tolist(self) -> list[int]:
        return list(self._values)


def _forms(values: list[int]) -> Iterator[Any]:
    yield list(values)
    yield tuple(values)
    yield iter(values)
    yield array("Q", values)
    yield memoryview(array("Q", values))
    yield _Tensor(array("Q", values))
    yield type("Ids", (list,), {})(values)
    yield range(len(values))
    if max(values, default=0) < 1 << 31:
        for code in "iIlLqQ":
            yield array(code, values)
        yield array("I", values * 2)[::2]
        yield memoryview(array("I", values * 2))[::2]


@pytest.mark.parametrize(
    "values",
    [[], [1, 2, 3, 4, 5], [0, 23, 24, 255, 256, 65_535, 65_536, 151_000], [1 << 32, (1 << 64) - 1] * 3],
)
def test_every_form_of_token_ids_is_taken_in_alike(values: list[int]) -> None:
    """Lists, tuples, iterators, arrays, memory views (with steps too) and tensors give the same hashes."""
    native, pure = _pair()
    for one, two in zip(_forms(values), _forms(values), strict=True):
        assert native.hash_tokens(one) == pure.hash_tokens(two), type(one)


def test_numpy_arrays_are_taken_in_alike() -> None:
    """Every integer dtype, order, step and byte order; what is no token id is refused in the same words."""
    numpy = pytest.importorskip("numpy")
    native, pure = _pair()
    values = numpy.arange(40) * 3
    forms = [
        *(values.astype(f"{order}{code}") for order in "<>" for code in CODES),
        values[::2],
        values[::-1],
        values.reshape(5, 8)[:, 0],
        values.astype("u4")[1:],
        numpy.frombuffer(b"\0" + bytes(range(36)), "u1")[1:].view("u1"),
        numpy.frombuffer(bytes(1 + 4 * 8), "u1")[1:].view("<u4"),
        list(values),
        values.reshape(5, 8),
        values - 5,
        values.astype("f4"),
        values.astype(bool),
        values.astype("u8") + numpy.uint64(1 << 63),
        numpy.array(5),
        numpy.array(["a"]),
        numpy.array([object()]),
        numpy.datetime64(5, "s"),
        numpy.timedelta64(5, "s"),
        numpy.array([1, 2, 3, 4], "M8[s]"),
        numpy.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 0]),
        numpy.ma.array([1, 2, 3, 4]),
    ]
    for form in forms:
        assert _outcome(lambda: native.hash_batch([form])) == _outcome(lambda: pure.hash_batch([form])), form  # noqa: B023
        assert _outcome(lambda: native.hash_tokens(form)) == _outcome(lambda: pure.hash_tokens(form)), form  # noqa: B023


BAD: list[Any] = [
    5, "1 2", b"12", bytearray(b"12"), {}, {1: 2}, [-1], [1, -1], [1 << 64], [1, True], [1.0], ["1"], [None],
    [[1]], (1, 2, -3), [2**70, "x"], array("i", [-1]), array("d", [1.0]), array("b", [1, -1]), object(),
    memoryview(b"ab").cast("c"), array("q", [-(1 << 63)]), [0] * 50 + [False], range(-1, 3),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(BAD)))
def test_bad_token_ids_are_refused_in_the_same_words(place: int) -> None:
    """Type, code, message and place of the error are equal, and a chain is left as it was."""
    native, pure = _pair()
    bad = BAD[place]
    expected = _outcome(lambda: pure.hash_tokens(bad))
    assert _outcome(lambda: native.hash_tokens(bad)) == expected
    assert expected[1] == "invalid-token"
    chain, reference = native.chain([1, 2, 3]), pure.chain([1, 2, 3])
    assert _outcome(lambda: chain.append(bad)) == _outcome(lambda: reference.append(bad))
    assert _seen(chain) == _seen(reference)
    batch = [[1], bad]
    assert _outcome(lambda: native.hash_batch(batch)) == _outcome(lambda: pure.hash_batch(batch))


@pytest.mark.parametrize("odd", [0, -1, 1 << 29, 1 << 30, 1 << 31, 1 << 32, 1 << 64, True, 1.0, None])
def test_an_odd_token_anywhere_in_a_list_is_seen(odd: Any) -> None:
    """Among whole blocks and behind the last: hashed where it is a token id, else refused in the same words."""
    for options in (
        {},
        {"algorithm": "sha256"},
        {"block_size": 1},
        {"block_size": 16},
        {"algorithm": "xxhash"},
    ):
        native, pure = _pair(**options)
        for place in range(19):
            tokens: list[Any] = list(range(70_000, 70_019))
            tokens[place] = odd
            for form in (list, tuple):
                given = form(tokens)
                assert _outcome(native.hash_tokens, given) == _outcome(pure.hash_tokens, given)


def test_the_layouts_of_this_interpreter_are_known(native: Any) -> None:
    """Lists of small ints are read without a call on every CPython of 64 bits that the package names."""
    known = sys.implementation.name == "cpython" and sys.maxsize > 1 << 32 and sys.version_info < (3, 15)
    assert native.probed() == ["small ints", "flat lists"] or not known


def test_a_list_in_any_state_is_read_as_it_is() -> None:
    """Grown, cut, emptied and refilled lists: what the native module knows of a list holds for these too."""
    native, pure = _pair()
    tokens: list[int] = []
    for step in range(60):
        if step % 7 == 3:
            del tokens[: len(tokens) // 2]
        elif step % 11 == 5:
            tokens.clear()
        else:
            tokens.extend(range(step * 1000, step * 1000 + step))
        assert native.hash_tokens(tokens) == pure.hash_tokens(tokens)
        assert native.hash_tokens(tuple(tokens)) == pure.hash_tokens(tuple(tokens))


class _Exported:
    """A tensor that shows itself through DLPack alone, as torch's do; counts how often it is made a list."""

    def __init__(self, values: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._values = values
        self._device = device
        self.lists = 0

    def __dlpack__(self) -> Any:
        return self._values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def tolist(self) -> Any:
        self.lists += 1
        return self._values.tolist()


def test_tensors_are_read_through_dlpack() -> None:
    """Side by side in this process's memory they are read in place; else as lists; the hashes are the same."""
    numpy = pytest.importorskip("numpy")
    native, pure = _pair()
    values = numpy.arange(40) * 3
    read_only = values.copy()
    read_only.flags.writeable = False
    forms = [
        *((_Exported(values.astype(code)), 0) for code in CODES),
        (_Exported(values[5:]), 0),
        (_Exported(values[:0]), 0),
        (_Exported(values[::2]), 1),
        (_Exported(values[::-1]), 1),
        (_Exported(values, device=(2, 0)), 1),
        (_Exported(read_only), 1),
        (_Exported(values.reshape(5, 8)), 1),
        (_Exported(values - 5), 1),
        (_Exported(values.astype("f4")), 1),
        (_Exported(values.astype(bool)), 1),
    ]
    for form, lists in forms:
        seen = _outcome(native.hash_tokens, form)
        assert form.lists == lists
        assert seen == _outcome(pure.hash_tokens, form), form._values.dtype
        batch = _outcome(native.hash_batch, [form, form])
        assert batch == _outcome(pure.hash_batch, [form, form])


def test_a_tensor_is_kept_while_it_is_read() -> None:
    """The tensor's memory is the exporter's until the tokens are hashed, and is given back then."""
    numpy = pytest.importorskip("numpy")
    from kvhash import _native

    values = numpy.arange(40)
    before = sys.getrefcount(values)
    tokens = _native.take_tokens(_Exported(values))
    assert tokens is not None
    assert sys.getrefcount(values) > before
    del tokens
    assert sys.getrefcount(values) == before


def test_a_batch_is_its_prompts_one_by_one() -> None:
    """Any number of threads, prompts of any form and length: the same lists, in the same order."""
    rng = random.Random(3)
    for changes in ({}, {"algorithm": "sha256"}, {"vllm": "0.9.2", "algorithm": "sha256"}, {"lookahead": 2}):
        native, pure = _pair(**changes)
        prompts: list[Any] = [
            [rng.randrange(150_000) for _ in range(rng.choice([0, 3, 4, 700, 3000]))] for _ in range(60)
        ]
        expected = [pure.hash_tokens(prompt) for prompt in prompts]
        for i in range(10, 60, 3):
            prompts[i] = array("I", prompts[i])
        prompts[7] = tuple(prompts[7])
        for threads in (None, 1, 2, 5, 1000):
            assert native.hash_batch(prompts, threads=threads) == expected
        assert pure.hash_batch(prompts) == expected
        assert native.hash_batch([]) == pure.hash_batch([]) == []


def test_a_bad_prompt_or_thread_count_refuses_the_batch() -> None:
    """The error names the prompt and the token; nothing is hashed half, and no thread is left behind."""
    native, pure = _pair()
    batch: list[Any] = [[1] * 4000] * 20 + [[1, 2, -5]] + [[1] * 4000] * 20
    for hasher in (native, pure):
        with pytest.raises(KvHashError) as caught:
            hasher.hash_batch(batch, threads=3)
        assert (caught.value.code, caught.value.at) == ("invalid-token", "$[20][2]")
        with pytest.raises(KvHashError) as caught:
            hasher.hash_batch(batch, threads=0)
        assert (caught.value.code, caught.value.at) == ("invalid-request", "$.threads")


def test_an_adapter_that_lacks_what_is_hashed_is_refused_alike() -> None:
    """Before the first block, with the same words."""
    native, pure = _pair()
    expected = _outcome(lambda: pure.chain([], lora={"name": "a"}))
    assert expected[1] == "invalid-lora"
    assert _outcome(lambda: native.chain([], lora={"name": "a"})) == expected


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`KVHASH_BACKEND` forces one, any other value is refused, and without it the native module is used."""
    for value, expected in (("python", "python"), ("native", "native"), ("", "native")):
        monkeypatch.setenv("KVHASH_BACKEND", value)
        assert kvhash.backend() == expected
    monkeypatch.setenv("KVHASH_BACKEND", "fast")
    with pytest.raises(UsageError, match="expected 'python' or 'native'"):
        kvhash.backend()


def test_a_forced_native_backend_that_is_not_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back silently where the native module was asked for by name."""
    from kvhash import _backend

    monkeypatch.setattr(_backend, "_import", lambda: (None, "No module named 'kvhash._native'"))
    monkeypatch.setenv("KVHASH_BACKEND", "native")
    with pytest.raises(MissingDependencyError, match="not built"):
        BlockHasher(hash_seed="0")
    monkeypatch.delenv("KVHASH_BACKEND")
    assert kvhash.backend() == "python"
    assert BlockHasher(hash_seed="0").hash_tokens([1] * 16)


def test_the_stub_says_what_the_module_has(native: Any) -> None:
    """`_native.pyi` has the module's public names, and each class its public members; no other."""
    stub = ast.parse((Path(kvhash.__file__).parent / "_native.pyi").read_text())
    named: dict[str, set[str]] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            members = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            fields = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            named[node.name] = {*members, *fields}
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named[node.target.id] = set()
    public = {name for name in vars(native) if not name.startswith("_")} | {"__version__"}
    assert set(named) == public - {"annotations"}
    for name, members in named.items():
        value = getattr(native, name)
        if isinstance(value, type):
            own = {member for member in vars(value) if not member.startswith("_")}
            assert {member for member in members if not member.startswith("_")} == own, name


def test_the_module_has_the_version_of_the_package(native: Any) -> None:
    """A module left over from another version would be told."""
    assert native.__version__ == kvhash.__version__
