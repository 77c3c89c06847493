# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready
# apart, because Flower holds typer back
ENGINES := .venv-engines

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types bench test-engines docs notebooks lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(READY): $(BASE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(READY)  ## make the virtual environment with everything for development

demo: $(BASE)  ## one-class clients, 5 of 100 a round: FedAvg beside FedAdaVR
	$(BIN)/fedbraid demo

test: $(READY) lint types  ## lint, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-engines: $(ENGINES)/.ready  ## Ray clusters and Flower fleets on this machine: real processes, killed ones too
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m engines tests/test_ray.py tests/test_flower.py

$(ENGINES)/.ready: pyproject.toml constraints-engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints-engines.txt torch
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints-engines.txt --editable '.[dev,ray,flower]'
	@touch $@

lint: $(READY)  ## ruff, format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## mypy, strict on the package
	$(BIN)/mypy

bench: $(READY)  ## speed against bare PyTorch, side by side
	$(BIN)/python benchmarks/speed.py

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## the site, into build/site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

notebooks: $(VENV)/.docs $(ENGINES)/.notebooks  ## run the notebooks again and keep what comes out
	$(BIN)/python docs/_site/run_notebooks.py notebooks/own-model-and-data.ipynb notebooks/byte-budget.ipynb
	$(ENGINES)/bin/python docs/_site/run_notebooks.py notebooks/simulation-to-deployment.ipynb

$(ENGINES)/.notebooks: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pip install --quiet 'nbclient>=0.10' 'ipykernel>=6.29'
	@touch $@

# constraints.in holds torch and the tools; everything else is the newest that fits
define pinned
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --constraint constraints.in torch
	build/lock/bin/python -m pip install --quiet --constraint constraints.in '.[$(1)]'
	{ echo '# Every version that make installs; `make lock` makes it anew.'; build/lock/bin/python -m pip freeze --exclude fedbraid | sed 's:+cpu::'; } > $(2)
endef
comma := ,

lock:  ## pin every version that make installs, anew
	$(call pinned,dev$(comma)docs,constraints.txt)
	$(call pinned,dev$(comma)ray$(comma)flower,constraints-engines.txt)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) $(ENGINES) .mypy_cache .ruff_cache .hypothesis build dist
