# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Options for `legato up`, such as: make serve ARGS="--workers 2 --tbt-target-ms 80"
ARGS ?=
# Options for pytest, such as: make test TESTS="tests/services -k stop". Without any: all tests, in two processes with a
# thread each, but for those that need the machine to themselves.
TESTS ?=
ALONE := tests/integration/test_stalls.py tests/integration/test_traces.py tests/integration/test_lifecycle.py
# Bytecode is written by whoever imports first, not when installing: most of torch is never imported. Where an environment
# forbids to write it, every process would compile all that it imports at each start, torch's for seconds.
unexport PYTHONDONTWRITEBYTECODE
# The version whose CPU build the tests run on; a worker takes any from 2.11.
TORCH := torch==2.13.0

.PHONY: help setup serve test check format clean bench-worker bench-peers

help:
	@echo "make serve   install what is missing and serve SmolLM2 at http://127.0.0.1:8000"
	@echo "make test    install what is missing and run all tests"
	@echo "make check   lint, strict typing, then all tests: what CI runs"
	@echo "make setup   virtual environment, packages and model only"
	@echo "make format  format the code"
	@echo "make bench-worker  how near the kernels come to what the machine can do"
	@echo "make bench-peers   beside other servers: ARGS=\"--peers FILE\" (docs/loadtest.md)"

setup: .venv/installed
	@$(BIN)/legato model pull smollm2 >/dev/null
	@$(BIN)/python -m gpu_worker.kernels.build >/dev/null

.venv/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile "$(TORCH)" --editable ".[gateway,tokenizer,worker,load,tracing,dev]"
	@touch $@

serve: setup
	@$(BIN)/legato up --log-format text $(ARGS)

test: setup
ifeq ($(TESTS),)
	OMP_NUM_THREADS=1 LEGATO_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ALONE:%=--ignore %)
	$(BIN)/pytest $(ALONE)
else
	$(BIN)/pytest $(TESTS)
endif

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-worker: setup
	@$(BIN)/python -m tests.bench.bench_worker $(ARGS)

bench-peers: setup
	@$(BIN)/python -m loadtest.experiments.peers $(ARGS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
