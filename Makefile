# make demo and make test set everything up in .venv by themselves; a second call finds it ready.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test soak lint types setup clean

demo: $(READY)
	$(BIN)/python recipes/hello.py

# One thread in each of up to four processes; the model is fetched before they race for it.
test: lint types
	$(BIN)/python -c 'import dscale.demo; dscale.demo.target()'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

soak: $(READY)
	PYTHONPATH=.:tests $(BIN)/python tests/soak.py
	DSCALE_SOAK=1 $(BIN)/python -m pytest tests/test_batcher_requests.py -k memory

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

setup: $(READY)

# torch goes first and alone, at one exact version: a range lets pip prefer a newer CUDA build of
# several gigabytes over a CPU wheel that is at hand. dflash is the reference for the drafter's
# parity tests; its own pins would drag in data-set tooling that no test uses.
$(READY): pyproject.toml constraints.txt Makefile
	@echo 'setting up .venv: a few minutes and about 2 GB of disk, once'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
