# `make help` lists the targets. A fresh clone needs Python >= 3.11 and make, nothing else.
#
#   PYTHON=python3.12 make test      another interpreter for the environment
#   VENV=/somewhere/else make test   another place for it
#   WHEELS=/folder make gpu          packages from that folder alone, without a network
#   WORKERS=0 make test              all tests in one process, instead of in two beside each other

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
DEMO_PROMPT ?= A train leaves at 3 pm and travels 60 miles per hour for 4 hours. How far does it go?

BIN := $(VENV)/bin
INPUTS := setup.cfg pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet \
  $(if $(WHEELS),--no-index --find-links $(WHEELS),-c constraints.txt)

# Tests on the default model are skipped, and say so, where it cannot be fetched.
PULL := $(BIN)/dflashd pull --quiet || echo "going on without the default model"

# A file's tests share what it starts, so that a file stays whole; the long files come first.
SUITE := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test lint check fix proof reference bench gpu gpu-soak gpu-bench soak adapters clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

# --- environments ------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version + "; say PYTHON=... make")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV): minutes, most of them for PyTorch"
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV): minutes, most of them for PyTorch"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed

# --- what a user runs --------------------------------------------------------------------------

demo: $(VENV)/installed  ## install, fetch the default model, generate once
	$(BIN)/dflashd pull
	$(BIN)/dflashd generate --max-tokens 96 --block-width 8 --stats "$(DEMO_PROMPT)"

test: $(VENV)/installed-dev  ## install, then every test except those for a GPU and the soak
	@$(PULL)
	$(BIN)/python $(SUITE)

# --- what a developer runs ---------------------------------------------------------------------

lint: $(VENV)/installed-dev  ## ruff, mypy, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## lint, and all tests with coverage (at least 95 % of branches)
	@$(PULL)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(SUITE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fix: $(VENV)/installed-dev  ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proof: $(VENV)/installed-dev  ## the full-size proofs; writes docs/proof.json, goes on where it was broken off
	$(BIN)/dflashd pull
	$(BIN)/python tests/proof/run.py

reference: $(VENV)/installed-dev  ## compare with the reference package, in an environment of its own
	$(BIN)/python tests/reference/run.py
	$(BIN)/python tests/reference/acceptance_store.py

bench: $(VENV)/installed-dev  ## measure on the public prompts; see benchmarks/README.md
	$(BIN)/dflashd pull
	$(BIN)/python benchmarks/decode.py

gpu: $(VENV)/installed-dev  ## the tests that need a CUDA device; STAGE=devices|ring|engines|pair: one
	$(BIN)/python -m pytest -m "gpu and not soak" tests/gpu/$(if $(STAGE),test_$(STAGE).py)

gpu-soak: $(VENV)/installed-dev  ## the same for a long time
	$(BIN)/python -m pytest -m "gpu and soak" tests/gpu

gpu-bench: $(VENV)/installed-dev  ## time per round on a CUDA device; see docs/gpu.md
	$(BIN)/python benchmarks/gpu.py

soak: $(VENV)/installed-dev  ## the tests that run for a long time
	HYPOTHESIS_PROFILE=explore DFLASH_RELIABILITY=docs/reliability.json $(BIN)/python -m pytest -m soak --timeout 0

adapters: $(VENV)/installed-dev  ## models of `transformers` at both ends of its admitted versions
	$(BIN)/python tests/adapters/run.py

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache .reference .peers .proof .adapters
