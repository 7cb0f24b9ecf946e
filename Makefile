# Everything a newcomer needs: `make demo` and `make test` on a machine with Python 3.11 or newer and nothing else.
#
# Each extra of pyproject.toml that is asked for leaves a stamp in the environment; a stamp is older than pyproject.toml
# exactly when the environment has to be brought up to date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SIZE ?= 3M
JOBS ?= 2
AT ?= tests
PYTEST_ARGS ?=
TARGET ?= gpt-toy
ARGS ?=

export AUTOPAR_TEST_JAX_CACHE ?= $(CURDIR)/.cache/jax
# Tests and benchmarks start dozens of processes, each of which would compile the project's sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo examples plan test exhaustive core goldens bench lint format docs ci clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

demo: $(VENV)/.installed-base ## train a byte-level GPT on 8 virtual devices (SIZE=10M for a larger one)
	@$(BIN)/python examples/train_gpt.py $(SIZE)

examples: $(VENV)/.installed-examples ## run every example at toy size; each ends with its own checks
	@for file in examples/*.py; do echo "=== $$file"; $(BIN)/python $$file toy; done

plan: $(VENV)/.installed-base ## plan a model: TARGET=llama3-8b ARGS="--cluster dgx-h100 --mesh 32,8"
	@$(BIN)/autopar plan $(TARGET) $(ARGS)

test: $(VENV)/.installed-test ## run the whole test suite, or a part of it: AT=tests/passes/op_groups
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(AT) $(PYTEST_ARGS)

exhaustive: $(VENV)/.installed-test ## run the suite with every case of its crossings, or a part of it; takes an hour
	@AUTOPAR_TESTS=all $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(AT) $(PYTEST_ARGS)

core: $(VENV)/.installed-test ## run the core of the test suite
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m core $(PYTEST_ARGS)

goldens: $(VENV)/.installed-test ## write what the text cases expect anew, all or some: ARGS="op_groups remat"
	@$(BIN)/python -m tests.support.goldens $(ARGS)

bench: $(VENV)/.installed-test ## run a benchmark: ARGS="equal --models gpt-toy"; ARGS=--help lists them
	@$(BIN)/autopar bench $(ARGS)

lint: $(VENV)/.installed-dev ## ruff, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

ci: ## all checks of a submission
	@bash .ci/run

clean: ## remove what was built, keeping the environments
	rm -rf build dist site .cache .pytest_cache .ruff_cache .hypothesis *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"autopar needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: try make PYTHON=python3.12")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# `base` is the package without extras. One line per package instead of pip's full log, so that a slow download is not
# a silent one; what pip has to say on stderr is shown when it fails.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing autopar ($*) into $(VENV); the first time downloads a few hundred MB"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
		-e '$(if $(filter base,$*),.,.[$*])' 2>$(VENV)/install.log \
		| { grep --line-buffered -E '^(Collecting|Installing|Successfully)' || true; } \
		|| { cat $(VENV)/install.log; exit 1; }
	@touch $@
