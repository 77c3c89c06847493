# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready
# Flower holds typer back, and so the lock does; who installs without it gets these, and the command line is tried with both
NEWEST := typer==0.29.0 rich==15.0.0
comma := ,

.DEFAULT_GOAL := help
.PHONY: help setup demo examples test test-lowest test-newest dist test-browser lint types bench bench-gpu test-engines tables docs notebooks class pictures chromium nats-server javascript lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# what $(1) names, by the versions in the lock; compiled on all cores, which pip does on one
define install
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt $(1)
	@$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true
endef

$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call install,torch --editable .)
	@touch $@

$(READY): $(BASE)
	$(call install,--editable '.[dev$(comma)docs$(comma)ray$(comma)flower$(comma)nats]')
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/newest $(NEWEST)
	@touch $@

setup: $(READY)  ## make the virtual environment with everything for development

demo: $(BASE)  ## one-class clients, 5 of 100 a round: FedAvg beside FedAdaVR
	$(BIN)/fedbraid demo

examples: $(READY)  ## tutorials of Flower, pfl and LEAF ported to fedbraid, some minutes; the peers beside them: examples/peers/beside.py
	$(BIN)/python examples/peers/beside.py

test: $(READY) lint types  ## lint, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -rs
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)/newest):$$PYTHONPATH $(BIN)/python -m pytest -n auto -rs tests/test_cli.py

SOME := tests/test_reductions.py tests/test_pseudocode.py tests/test_contract.py tests/test_first_week.py tests/test_sweep.py tests/test_compare.py tests/test_private.py tests/test_codecs.py tests/test_resume.py
TRIED := build/tried

# $(1) is a folder for a virtual environment, $(2) the packages
define try
	rm -rf $(1) && $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet $(2)
	$(1)/bin/python -m pip install --quiet --no-deps .
	cd tests && OMP_NUM_THREADS=1 ../$(1)/bin/python -m pytest -n auto -rs -c ../pyproject.toml --rootdir .. $(addprefix ../,$(SOME))
endef

test-lowest:  ## the tests of what users call, with the lowest versions that pyproject.toml allows (torch: the lock's)
	$(call try,$(TRIED)/lowest,$$(.ci/lowest))

test-newest:  ## the same with the newest versions; torch pulls gigabytes of CUDA packages unless PIP_EXTRA_INDEX_URL has CPU wheels
	$(call try,$(TRIED)/newest,torch '.[data$(comma)plot$(comma)sweep$(comma)frames$(comma)privacy]' pytest pytest-xdist hypothesis scipy psutil)

dist:  ## sdist and wheel into build/dist, each tried in a fresh environment away from the repository
	.ci/dist

test-browser: $(READY) chromium  ## reports, live pages and the site in headless Chromium, which apt-get brings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadscope -rs -m browser $$(grep -l mark.browser tests/test_*.py)

chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "install Chromium first"; exit 1; }; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

nats-server:
	@command -v nats-server >/dev/null || test -x /usr/sbin/nats-server || { \
	  command -v apt-get >/dev/null || { echo "install nats-server first: nats.io, or your system's package"; exit 1; }; \
	  echo "installing nats-server with apt-get"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends nats-server >/dev/null; }

JS := examples/javascript-node
javascript:
	@if command -v npm >/dev/null; then \
	  test -d $(JS)/node_modules || { echo "installing the packages of $(JS) with npm"; (cd $(JS) && npm ci --silent --no-audit --no-fund); }; \
	else echo "Node.js 20 is not installed: the tests of $(JS) are skipped"; fi

SET ?= engines  # or quick: the few that show that it works at all
test-engines: $(READY) nats-server javascript  ## Ray clusters and fleets on this machine: real processes, killed ones too; SET=quick for few
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(filter quick,$(SET)),-n 2 --dist loadscope) -rs -m $(SET) tests/test_broker.py tests/test_javascript.py tests/test_fleet.py tests/test_deployment.py tests/test_flower.py tests/test_ray.py tests/test_private_fleet.py tests/test_same_file.py tests/test_benchmarks.py

lint: $(READY)  ## ruff, format and rules, and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(READY)  ## mypy, strict on the package
	$(BIN)/mypy

bench: $(READY)  ## speed against bare PyTorch, side by side
	$(BIN)/python benchmarks/speed.py

# it was never run by its authors, who had no GPU: paste what it prints into an issue
bench-gpu: $(READY)  ## the same on a CUDA GPU
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('PyTorch sees no CUDA GPU; install a CUDA build of torch into $(VENV) first')"
	@$(BIN)/python -c "import torch, fedbraid; print(torch.cuda.get_device_name(), 'torch', torch.__version__, 'fedbraid', fedbraid.__version__)"
	$(BIN)/python benchmarks/speed.py --device cuda --engine in_process
	$(BIN)/python benchmarks/speed.py --device cuda --engine "in_process(precision='bfloat16')" W3 W6 W7 W8

tables: $(READY)  ## write the tables that stand in docs/ anew
	$(BIN)/python docs/_site/content.py

pictures: $(READY) chromium  ## make the pictures of the docs from real runs
	$(BIN)/python docs/_site/screenshots.py

docs: $(READY)  ## the site, into build/site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

OUT ?=  # a folder for what comes out; in place where it is empty
BOOKS = docs/_site/run_notebooks.py $(if $(strip $(OUT)),--out $(OUT))
notebooks: $(READY)  ## run the notebooks again and keep what comes out
	$(BIN)/python $(BOOKS) notebooks/class/6*.ipynb notebooks/*.ipynb notebooks/class/[1-5]*.ipynb  # the longest first

class: $(READY)  ## run the short notebooks for a class, some ten seconds each
	$(BIN)/python $(BOOKS) notebooks/class/*.ipynb

# constraints.in holds torch and the tools; everything else is the newest that fits
lock:  ## pin every version that make installs, anew
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --constraint constraints.in torch
	build/lock/bin/python -m pip install --quiet --constraint constraints.in '.[dev$(comma)docs$(comma)ray$(comma)flower$(comma)nats]'
	{ echo '# Every version that make installs; made by `make lock`.'; build/lock/bin/python -m pip freeze --exclude fedbraid | sed 's:+cpu::'; } > constraints.txt

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist
