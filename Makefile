# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready
# apart, because Flower holds typer back
ENGINES := .venv-engines
comma := ,

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-browser lint types bench test-engines tables docs notebooks class pictures chromium lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# into a virtual environment $(1), by the versions in $(2), what $(3) names; compiled on all cores, which pip does on one
define install
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) $(3)
	@$(1)/bin/python -m compileall -q -q -j 0 $(1)/lib || true
endef

$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),constraints.txt,torch --editable .)
	@touch $@

$(READY): $(BASE)
	$(call install,$(VENV),constraints.txt,--editable '.[dev]')
	@touch $@

setup: $(READY)  ## make the virtual environment with everything for development

demo: $(BASE)  ## one-class clients, 5 of 100 a round: FedAvg beside FedAdaVR
	$(BIN)/fedbraid demo

test: $(READY) lint types  ## lint, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -rs

test-browser: $(VENV)/.docs chromium  ## reports, live pages and the site in headless Chromium, which apt-get brings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadscope -rs -m browser

chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "install Chromium first"; exit 1; }; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

SET ?= engines  # or quick: the few that show that it works at all
test-engines: $(ENGINES)/.ready  ## Ray clusters and Flower fleets on this machine: real processes, killed ones too; SET=quick for few
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -rs -m $(SET) tests/test_ray.py tests/test_flower.py tests/test_fleet.py tests/test_supernode.py tests/test_private_fleet.py tests/test_same_file.py tests/test_benchmarks.py

$(ENGINES)/.ready: pyproject.toml constraints-engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(call install,$(ENGINES),constraints-engines.txt,torch --editable '.[dev$(comma)ray$(comma)flower$(comma)notebooks]')
	@touch $@

lint: $(READY)  ## ruff, format and rules, and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(READY)  ## mypy, strict on the package
	$(BIN)/mypy

bench: $(READY)  ## speed against bare PyTorch, side by side
	$(BIN)/python benchmarks/speed.py

$(VENV)/.docs: $(READY)
	$(call install,$(VENV),constraints.txt,--editable '.[docs]')
	@touch $@

tables: $(READY)  ## write the tables that stand in docs/ anew
	$(BIN)/python docs/_site/content.py

pictures: $(READY) chromium  ## make the pictures of the docs from real runs
	$(BIN)/python docs/_site/screenshots.py

docs: $(VENV)/.docs  ## the site, into build/site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

OUT ?=  # a folder for what comes out; in place where it is empty
BOOKS = docs/_site/run_notebooks.py $(if $(strip $(OUT)),--out $(OUT))
notebooks: $(VENV)/.docs $(ENGINES)/.ready  ## run the notebooks again and keep what comes out
	$(BIN)/python $(BOOKS) notebooks/class/*.ipynb notebooks/own-model-and-data.ipynb notebooks/byte-budget.ipynb
	$(ENGINES)/bin/python $(BOOKS) notebooks/simulation-to-deployment.ipynb

class: $(VENV)/.docs  ## run the short notebooks for a class, some ten seconds each
	$(BIN)/python $(BOOKS) notebooks/class/*.ipynb

# constraints.in holds torch and the tools; everything else is the newest that fits
define pinned
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --constraint constraints.in torch
	build/lock/bin/python -m pip install --quiet --constraint constraints.in '.[$(1)]'
	{ echo '# Every version that make installs; made by `make lock`.'; build/lock/bin/python -m pip freeze --exclude fedbraid | sed 's:+cpu::'; } > $(2)
endef

lock:  ## pin every version that make installs, anew
	$(call pinned,dev$(comma)docs,constraints.txt)
	$(call pinned,dev$(comma)ray$(comma)flower$(comma)notebooks,constraints-engines.txt)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) $(ENGINES) .mypy_cache .ruff_cache .hypothesis build dist
