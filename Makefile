# make demo trains a head and measures it. make test runs the tests. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
TARGET := targets/smollm2-135m
# Threads that wait by spinning for long slow each other down badly when the machine has other work (RESULTS.md).
export GOMP_SPINCOUNT ?= 2000

READY := .venv/ready $(TARGET)/config.json

.PHONY: help setup demo test quick lint engines

help:
	@echo "make setup   virtual environment in .venv, and the default target (once, a few minutes)"
	@echo "make demo    train head=eagle on the CPU, validated by decoding; then the shipped head"
	@echo "make test    all tests, in two processes (about 6 minutes on two cores)"
	@echo "make quick   a selection of them for daily work: each kind of head once, nothing that trains (under a minute)"
	@echo "make lint    ruff and mypy"
	@echo "make engines vLLM, Speculators and llama.cpp on the CPU, in engines (once, 4 minutes, 4 GB), for tests of exports"

setup: $(READY)
	@$(BIN)/python -m tests.compiler

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch .venv/ready

$(TARGET)/config.json: | .venv/ready
	$(BIN)/python scripts/get_target.py out=$(TARGET)

demo: $(READY)
	@if [ -e checkpoints/demo/finished ]; then \
	  echo "checkpoints/demo is trained; delete it to train again."; \
	else \
	  $(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    train.py run=demo resume=true; \
	fi
	@echo; echo "== The head that ships, trained longer =="
	$(BIN)/python scripts/generate.py checkpoint=checkpoints/shipped/eagle \
	  prompt="Write a Python function that returns the factorial of a number."

# Each process runs on one thread (tests/conftest.py). Processes take tests from one another when they have none left.
test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

quick: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

engines: .venv/ready
	@$(BIN)/python scripts/get_engines.py
