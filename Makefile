# Two commands set everything up: `make quickstart` and `make test`.
# The first of these that runs (a version manager may leave a name on the path with nothing behind it).
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c "" 2>/dev/null && command -v $$p && break; done)
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test lint types format docs clean

quickstart: $(STAMP)
	$(BIN)/verl-shard quickstart $(ARGS)

# Whole files of tests go to one worker, which makes their fixtures once.
test: $(STAMP) lint types
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into build/site; a link or a name that leads nowhere ends it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch goes first and alone: under its pin pip takes the build that is at hand, and every later requirement is satisfied by it.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
