# vitkernels: `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/lock.txt

.DEFAULT_GOAL := help
.PHONY: help setup train test lint lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Make .venv with locked versions (on Linux x86-64 with torch_xla: trains on CPU, CUDA and TPU)

train: setup ## Train a small ViT on handwritten digits, on this machine, in a minute or two; ARGS="..." adds settings
	$(BIN)/python train.py $(ARGS)

test: setup ## Run the tests; ARGS="..." goes to pytest
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## Check style with ruff, and shell scripts with shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck scripts/*.sh .ci/run

lock: $(VENV)/uv/bin/uv ## Resolve requirements/lock.txt anew from pyproject.toml
	$(VENV)/uv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	  --extra train --extra tpu --extra cuda --extra cluster --group dev --no-annotate --no-header --upgrade --output-file $(LOCK)

clean: ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

# uv comes through pip into an environment of its own, unless the machine has one.
$(VENV)/uv/bin/uv:
	@mkdir -p $(VENV)
	@if command -v uv >/dev/null; then mkdir -p $(@D) && ln -sf "$$(command -v uv)" $@; \
	 else $(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install --quiet uv; fi

# The oldest and newest Python that every locked wheel exists for.
$(VENV)/.ready: $(LOCK) pyproject.toml $(VENV)/uv/bin/uv
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	  "vitkernels needs Python 3.11 to 3.13, and %s is %d.%d: make setup PYTHON=python3.12" % (sys.executable, *v))'
	$(VENV)/uv/bin/uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(VENV)
	$(VENV)/uv/bin/uv pip sync --quiet --python $(BIN)/python --require-hashes $(LOCK)
	$(VENV)/uv/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
