# `make demo` and `make test` need nothing but python3 (3.10 or newer): each prepares .venv itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test lint types contract unit setup clean

demo: setup
	$(BIN)/shiva demo

test: lint types contract unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contract: setup
	$(BIN)/lint-imports

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --durations=10

setup: $(VENV)/.installed

# torch goes first: a package that asks for torch with none present would pull a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
