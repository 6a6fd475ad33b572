# Two commands set everything up: `make demo` shows the engine, `make test` checks it. Each makes its
# own virtual environment from constraints.txt; a second run starts at once.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint exact bench clean

PIP := -m pip install -qq --disable-pip-version-check --constraint constraints.txt
PROMPT := import os\n\n\ndef read_lines(path):\n
TOKENS ?= 160

# The contract holds for a fixed thread count, so the tests fix it; one thread each also lets two
# test processes share two cores.
test exact: export OMP_NUM_THREADS := 1
test exact: export MKL_NUM_THREADS := 1
test exact: export OPENBLAS_NUM_THREADS := 1

help:
	@echo "make demo   the packaged model writes Python, drafted as trees, with statistics"
	@echo "make test   ruff, mypy and the CPU tests (under 10 minutes on two cores)"
	@echo "make exact  the exactness contract over the full product of its axes (up to 45 minutes)"
	@echo "make bench  measures decoding speed"

demo: .venv-demo/ready
	@printf '$(PROMPT)' | .venv-demo/bin/kdtree generate --prompt-file - --max-tokens $(TOKENS)

test: lint
	@.venv/bin/python -m pytest -n 2 --dist worksteal -q -m "not gpu and not exact"

lint: .venv/ready
	@.venv/bin/ruff check .
	@.venv/bin/mypy

exact: .venv/ready
	@PYTHONPATH=tests .venv/bin/python tests/e2e/exact.py product

bench: .venv/ready
	@.venv/bin/python benches/decode.py

clean:
	@rm -rf .venv .venv-demo

# `ready` is written last: an install that broke off is made anew.
.venv-demo/ready: constraints.txt pyproject.toml
	@echo "making .venv-demo: installing what the engine needs (a minute or two) ..."
	@rm -rf .venv-demo && $(PYTHON) -m venv .venv-demo
	@.venv-demo/bin/python $(PIP) --editable .
	@touch $@

.venv/ready: constraints.txt pyproject.toml
	@echo "making .venv: installing the engine and its test tools (a few minutes) ..."
	@rm -rf .venv && $(PYTHON) -m venv .venv
	@.venv/bin/python $(PIP) --editable '.[dev]'
	@touch $@
