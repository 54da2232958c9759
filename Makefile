# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# The CPU build where the machine has one; set TORCH=torch, or a wheel, for another.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
# One thread a worker: two workers with two threads each would fight for two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
DEMO := runs/demo

.PHONY: demo install docs lint test test-all test-gpu test-interpreter clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'   # before anything that depends on torch and would pick another build
	$(PIP) --editable '.[hf,cli,data,chat,plan,bench,docs,dev]'
	touch $@

demo: install
	rm -rf $(DEMO)
	$(BIN)/python examples/make_rollouts.py $(DEMO)/rollouts.jsonl
	$(BIN)/harts inspect $(DEMO)/rollouts.jsonl --capacity 4096
	$(BIN)/harts plan $(DEMO)/rollouts.jsonl --capacity 4096 --replicas 2 --report $(DEMO)/plan.html
	$(BIN)/harts verify $(DEMO)/rollouts.jsonl --model tiny:bailing_hybrid --capacity 4096
	$(BIN)/harts train recipes/demo.toml data.path=$(DEMO)/rollouts.jsonl output.dir=$(DEMO)/run

# The site, in build/site; a broken link or a missing page is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict   # --quiet would hide warnings from strict

lint: install docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST) -n 2 -m 'not slow and not gpu'

test-all: lint
	$(PYTEST) -n 2 -m 'not gpu'

# On the GPU machine, with the packages it has (the cuda extra); writes benchmarks/results.
test-gpu:
	PYTHONPATH=src:. $(PYTHON) benchmarks/gpu_tests.py --write

# Triton kernels on a CPU, tiny. Triton 3.6 needs numpy before 2.4 there.
INTERPRETER := $(VENV)-interpreter
test-interpreter: install
	$(PYTHON) -m venv $(INTERPRETER)
	$(INTERPRETER)/bin/python -m pip install --quiet 'triton==3.6.0' 'numpy<2.4' '$(TORCH)' '.[hf,dev]'
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(INTERPRETER)/bin/python -m pytest -n 2 -m triton tests/ops

clean:
	rm -rf $(VENV) $(INTERPRETER) runs
