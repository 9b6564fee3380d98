# make demo shows what a head is worth. make test runs the tests. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
TARGET := targets/smollm2-135m
# processes that run the tests
PROCESSES ?= 2

READY := .venv/ready $(TARGET)/config.json

# For `make gpu`: pure Python, as a GPU machine's image may lack them; those with compiled parts must be there
GPU_WHEELS := accelerate datasets dill execnet gguf hydra-core iniconfig jinja2 markdown-it-py mdurl \
  annotated-types multiprocess omegaconf peft pluggy pydantic pygments pytest pytest-xdist rich typing-inspection
# With compiled parts, for Linux on x86-64
GPU_BINARY_WHEELS := pydantic-core xxhash
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_PROCESSES ?= 8
GPU_OPTIONS ?=
GPU := .venv-gpu/bin/python

.PHONY: help setup demo test test-full test-engines test-gpu-code lint site engines gpu gpu-wheels gpu-test

help:
	@echo "make setup   virtual environment in .venv, and the default target (once)"
	@echo "make demo    a shipped head beside plain decoding, a training that follows a service, and a table (8 minutes at most)"
	@echo "make test    the first tier of tests, in two processes (6:57 on two cores); on more cores: make test PROCESSES=8"
	@echo "make test-full     all tests but those of engines"
	@echo "make test-engines  exports inside vLLM and llama.cpp, after make engines"
	@echo "make test-gpu-code  code for GPUs, generated and checked without one (installs triton, 190 MB)"
	@echo "make lint    ruff and mypy"
	@echo "make site    these pages as a site with a search, in build/site"
	@echo "make engines vLLM, llama.cpp and OpenVINO on the CPU, in engines (once, 6 GB), for tests of exports"
	@echo "make gpu     on a machine with CUDA, without a network: what works there and how fast (again: what is missing)"
	@echo "make gpu-wheels  what that machine may lack, into gpu-wheels, to be copied there"

setup: $(READY)
	@$(BIN)/python -m tests.support.compiler

# --no-compile: few modules of these packages are imported, and Python compiles each at its first import.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile torch==2.13.0
	@$(BIN)/pip uninstall --quiet --yes specdec 2>/dev/null # this distribution's former name, with the same files
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch .venv/ready

$(TARGET)/config.json: | .venv/ready
	$(BIN)/python scripts/get_target.py out=$(TARGET)

demo: $(READY)
	@$(BIN)/python scripts/demo.py

# Each process runs on one thread (tests/conftest.py). Processes take tests from one another when they have none left.
PYTEST := $(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal

test: $(READY)
	$(PYTEST) -m "not full and not engines and not triton"

# Packages of the site and of the notebook, which only these two targets need.
.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,docs]'
	@touch .venv/docs

site: .venv/docs
	$(BIN)/python -m sphinx -q -n -W --keep-going -c docs . build/site
	@echo "Open build/site/index.html"

test-full: $(READY) .venv/docs
	$(PYTEST) -m "not engines and not triton"

test-engines: $(READY)
	@test -x engines/bin/python || { echo "make engines installs vLLM and llama.cpp first (4 GB)."; exit 1; }
	$(PYTEST) -m engines

# Triton, which comes with torch for GPUs only.
.venv/gpu-code: .venv/ready
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,gpu-code]'
	@touch .venv/gpu-code

test-gpu-code: $(READY) .venv/gpu-code
	$(PYTEST) -m triton

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && cp train.py .mypy_cache/train_command.py && $(BIN)/mypy .mypy_cache/train_command.py

engines: .venv/ready
	@$(BIN)/python -m benchmarks.engines.get_engines

gpu-wheels: .venv/ready
	rm -rf gpu-wheels
	$(BIN)/pip download --quiet --no-deps --constraint constraints.txt --dest gpu-wheels \
	  --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) --platform any --abi none $(GPU_WHEELS)
	$(BIN)/pip download --quiet --no-deps --constraint constraints.txt --dest gpu-wheels \
	  --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) --platform manylinux2014_x86_64 $(GPU_BINARY_WHEELS)
	$(BIN)/pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir gpu-wheels antlr4-python3-runtime

# Without wheels the script says what to do.
.venv-gpu/ready: $(wildcard gpu-wheels/*.whl)
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "$(GPU_PYTHON) has no torch that sees a CUDA device; name one that has: make gpu GPU_PYTHON=..."; exit 1; }
	@$(GPU_PYTHON) benchmarks/gpu_environment.py .venv-gpu gpu-wheels
	@touch .venv-gpu/ready

# All tests, in place of those of the report, which are marked gpu. Each process holds about half a gigabyte of the GPU's memory.
gpu-test: .venv-gpu/ready
	@$(GPU) -m pytest -q -n $(GPU_PROCESSES) --dist worksteal -m "not engines and not triton"

# Writes gpu_report.jsonl and gpu_report.md, figure by figure; GPU_OPTIONS="part=1 out=folder/" and others: --help
gpu: .venv-gpu/ready
	@$(GPU) -m benchmarks.gpu_report $(GPU_OPTIONS)
