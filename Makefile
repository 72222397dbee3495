# `make demo`, `test`, `docs` and `wheels` need nothing but python3 (3.10 or newer): each prepares .venv itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test lint types contract unit docs notebook releases wheels setup browser clean

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

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What the weights or the code have changed is drawn anew into the notebook.
notebook: setup
	PYTHONWARNINGS=ignore:IProgress $(BIN)/jupyter execute --inplace examples/first.ipynb

# Every release of diffusers that is supported, each in a virtualenv of its own.
releases: setup
	$(BIN)/python tests/releases.py --write

wheels: setup
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist --wheel packages/models

unit: setup browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations=10
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/rehearsal.py

setup: $(VENV)/.installed

# The report page and the server are tested in Chromium; without it those tests are left out, and say so.
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	     && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium chromium-driver >/dev/null; } \
	|| echo "no Chromium: the browser tests are left out (install chromium and chromedriver to run them)"

# torch goes first: a package that asks for torch with none present would pull a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
