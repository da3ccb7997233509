# Two commands set everything up: `make quickstart` and `make test`.
# The first of these that runs (a version manager may leave a name on the path with nothing behind it).
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c "" 2>/dev/null && command -v $$p && break; done)
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each file of tests that all need GPUs, and the single tests that do: tests/test_makefile.py holds the list to what is skipped.
GPU_TESTS ?= $(wildcard tests/*/test_*on_gpus.py) \
  tests/runtime/test_pipeline.py::test_a_gradient_moves_with_its_parameter \
  tests/runtime/test_pipeline.py::test_on_two_gpus \
  tests/runtime/test_pipeline.py::test_a_loaded_model_is_dispatched_anew \
  tests/runtime/test_pipeline_micro_batches.py::test_on_two_gpus \
  tests/runtime/test_relocate.py::test_from_one_gpu_to_two_and_back \
  tests/runtime/test_packed.py::test_the_kernel_on_a_gpu \
  tests/verl_plugin/test_engine_batches.py::test_a_gpu_is_waited_for_by_no_forward
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

.PHONY: quickstart test gpu-tests lint types format docs clean

quickstart: $(STAMP)
	$(BIN)/verl-shard quickstart $(ARGS)

# Whole files of tests go to one worker, which makes their fixtures once.
test: $(STAMP) lint types
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope $(ARGS)

# In this order and one by one, as each has all GPUs. Warnings are no errors here, as drivers and kernels have their own; no
# plugin of pytest is needed, and where there is no .venv the python3 that finds the packages is taken, and nothing is installed.
gpu-tests:
	$(GPU_PYTHON) -m pytest -o addopts= --import-mode=importlib -W default -v -ra --durations=0 $(GPU_TESTS) $(ARGS)

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
