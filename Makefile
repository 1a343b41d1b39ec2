# Everything happens inside this checkout: the virtual environment is .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-long test-engine bench-engine gpu-check interop check contract format bench wheel vectors-archive clean

help:
	@echo "make demo       hash a real prompt; check every hash of recorded vLLM runs and of an engine run here"
	@echo "make test       set up and run the whole test suite"
	@echo "make check      formatter, linter and type checker"
	@echo "make bench      ratios against vLLM's own hashing functions"
	@echo "make wheel      a wheel for CPython 3.10 to 3.14, tried in a clean environment of every Python found"
	@echo "make test-long  the tests that take minutes"
	@echo "make vectors-archive  the test vectors as a release archive, in dist/"
	@echo "make test-engine  real models on the engine; installs torch (several GB) into an environment of its own"
	@echo "make bench-engine, make gpu-check  what the engine makes of a model's speed; kernels on an NVIDIA GPU"
	@echo "make interop    tests against vLLM's own code, which they download"

$(STAMP): pyproject.toml
	@echo "== setting up $(VENV) (Python packages only; nothing outside this folder is changed)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvhash needs Python 3.10 or newer; say which with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo/demo.py

test: $(STAMP)
	@echo "== running the test suite"
	@$(BIN)/python -m pytest -m "not long and not interop and not torch"

test-long: $(STAMP)
	@echo "== running the long tests"
	@$(BIN)/python -m pytest -m "long and not torch"
	@if command -v cargo >/dev/null; then echo "== fuzzing the crate"; cd sdk/rust && KVHASH_FUZZ_SECONDS=60 cargo test --release --quiet -p kvhash --test fuzz; \
	elif [ -n "$$KVHASH_REQUIRE_ALL" ]; then echo "cargo is required and missing"; exit 1; \
	else echo "== cargo is not installed: the crate is not fuzzed"; fi

# torch is several GB, so what needs it has an environment of its own.
ENGINE := .venv-engine
ENGINE_STAMP := $(ENGINE)/.installed

$(ENGINE_STAMP): pyproject.toml
	@echo "== setting up $(ENGINE) with torch (several GB)"
	@test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	@$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --editable '.[dev,engine]' peft
	@touch $@

test-engine: $(ENGINE_STAMP)
	@echo "== real models on the engine"
	@KVHASH_REQUIRE_TORCH=1 $(ENGINE)/bin/python -m pytest -m "not long" tests/engine_models

bench-engine: $(ENGINE_STAMP)
	@$(ENGINE)/bin/python benchmarks/bench_engine.py

gpu-check: $(ENGINE_STAMP)
	@$(ENGINE)/bin/python tools/gpu_check.py

interop: $(STAMP)
	@echo "== against vLLM's own publisher (downloads the vllm package once, into .cache)"
	@$(BIN)/python -m pytest -m interop tests/interop

check: $(STAMP)
	@echo "== ruff format, ruff check, mypy"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@echo "== contract tables of the other languages are up to date"
	@$(BIN)/python tools/gen_contract.py --check
	@$(BIN)/python tools/gen_contract_ts_java.py --check
	@$(BIN)/python tools/gen_contract_rust.py --check
	@if command -v go >/dev/null; then echo "== gofmt, go vet"; for module in sdk/go examples/router-go; do (cd $$module && test -z "$$(gofmt -l .)" && go vet ./...) || exit 1; done; \
	elif [ -n "$$KVHASH_REQUIRE_ALL" ]; then echo "go is required and missing"; exit 1; \
	else echo "== go is not installed: its checks are skipped"; fi
	@if command -v cargo >/dev/null; then echo "== cargo fmt, clippy, doc"; for crates in sdk/rust examples/router-rust; do (cd $$crates && cargo fmt --all --check && cargo clippy --quiet --workspace --all-targets -- -D warnings \
	    && RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --workspace) || exit 1; done; \
	elif [ -n "$$KVHASH_REQUIRE_ALL" ]; then echo "cargo is required and missing"; exit 1; \
	else echo "== cargo is not installed: its checks are skipped"; fi

contract: $(STAMP)
	@$(BIN)/python tools/gen_contract.py
	@$(BIN)/python tools/gen_contract_ts_java.py
	@$(BIN)/python tools/gen_contract_rust.py

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP)
	@KVHASH_BACKEND=python $(BIN)/python benchmarks/bench_hash.py
	@echo "== the native core"
	@$(BIN)/python benchmarks/bench_native.py
	@echo "== a step of the engine's core"
	@$(BIN)/python benchmarks/bench_engine_core.py
	@echo "== events, the residency index, the router"
	@$(BIN)/python benchmarks/bench_events.py
	@$(BIN)/python benchmarks/bench_index.py
	@$(BIN)/python benchmarks/bench_router.py

vectors-archive: $(STAMP)
	@mkdir -p dist
	@$(BIN)/kvhash vectors archive dist

wheel: $(STAMP)
	@echo "== building a wheel for every CPython from 3.10 on into dist/"
	@rm -f dist/*.whl
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python tools/check_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) $(ENGINE) .demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
