# vitkernels: `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/lock.txt
NEWEST := requirements/newest.txt

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-gpu newest test-newest wheel-test lint docs lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Make .venv with locked versions (on Linux x86-64 with torch_xla: trains on CPU, CUDA and TPU)

train: setup ## Train a small ViT on handwritten digits, on this machine, in a minute or so; ARGS="..." adds settings
	$(BIN)/python train.py $(ARGS)

# One file stays in one process: its fixtures are made once, and torch_xla starts once. tests/conftest.py orders files.
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder

test: setup ## Run the tests but those marked slow, on all cores; ARGS="..." goes to pytest
	$(BIN)/python $(PYTEST) -n auto -m "not slow" $(ARGS)

test-all: setup ## Run all tests, on all cores; ARGS="..." goes to pytest
	$(BIN)/python $(PYTEST) -n auto $(ARGS)

test-gpu: ## Run the tests that need an NVIDIA GPU, on all cores, with the Python on the PATH
	$(PYTHON) -m pytest -n auto --maxprocesses 16 -m gpu -p no:benchmark $(ARGS)

newest: $(VENV)/newest/.ready ## Make .venv/newest: Python 3.12 with the newest JAX, and PyTorch as GPU images have it

# The tests that skip themselves with an older JAX; those of the bridge run in the first command.
NEEDS_NEW_JAX = $(filter-out tests/bridge/%, $(shell grep -l needs_new_jax tests/*/test_*.py))

test-newest: newest ## Run the tests of the bridge, and of the kernels that need the newest JAX or Triton, with .venv/newest
	$(VENV)/newest/bin/python -m pytest tests/bridge tests/attention/test_pallas_flash_faithful.py $(ARGS)
	$(VENV)/newest/bin/python -m pytest -m "not slow" $(NEEDS_NEW_JAX) tests/ops/test_hopper_kernels_ahead.py \
	  tests/attention/test_triton_flash_hopper.py $(ARGS)

wheel-test: setup ## Build the wheel, install it into an empty environment, and train, evaluate and sweep with it
	.ci/wheel

lint: setup ## Check style (ruff), layers (import-linter), types (mypy) and shell scripts (shellcheck)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/shellcheck scripts/*.sh .ci/run .ci/wheel

docs: setup ## Build the documentation site in docs/_build/html, warnings as errors
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html

lock: $(VENV)/uv/bin/uv ## Resolve requirements/*.txt from pyproject.toml and newest.in
	$(VENV)/uv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	  --extra train --extra tpu --extra cuda --extra cluster --extra export --extra shards --extra wandb --extra mlflow \
	  --group dev --group neighbours --group docs --no-annotate --no-header --upgrade --output-file $(LOCK)
	$(VENV)/uv/bin/uv pip compile requirements/newest.in --python-version 3.12 --generate-hashes \
	  --no-annotate --no-header --upgrade --output-file $(NEWEST)

clean: ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

# pip installs uv into its own environment, unless the machine has uv.
$(VENV)/uv/bin/uv:
	@mkdir -p $(VENV)
	@if command -v uv >/dev/null; then mkdir -p $(@D) && ln -sf "$$(command -v uv)" $@; \
	 else $(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install --quiet uv; fi

# The oldest and newest Python that every locked wheel exists for. Compiled here: where Python may write no bytecode
# (PYTHONDONTWRITEBYTECODE, a read-only environment) each start of train.py would compile for 10 s.
$(VENV)/.ready: $(LOCK) pyproject.toml $(VENV)/uv/bin/uv
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	  "vitkernels needs Python 3.11 to 3.13, and %s is %d.%d: make setup PYTHON=python3.12" % (sys.executable, *v))'
	$(VENV)/uv/bin/uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(VENV)
	$(VENV)/uv/bin/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes $(LOCK)
	$(VENV)/uv/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

# uv takes a Python 3.12 from the PATH, or one of pyenv's, which its shims hide, or fetches one.
$(VENV)/newest/.ready: $(NEWEST) $(VENV)/uv/bin/uv
	PATH="$$(printf '%s:' "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin)$$PATH" \
	  $(VENV)/uv/bin/uv venv --quiet --allow-existing --python 3.12 $(VENV)/newest
	$(VENV)/uv/bin/uv pip sync --quiet --python $(VENV)/newest/bin/python --require-hashes $(NEWEST)
	@touch $@
