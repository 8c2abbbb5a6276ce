# Every target sets up what it needs: a fresh machine has to bring Python 3.11 or newer, make and nothing else.
# The first target run fills .venv; later ones start at once, until a file changes that the installation depends on.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src tests benchmarks examples docs hatch_build.py)
NATIVE := src/paceline/update/rows/native.c src/paceline/update/steps.c
INSTALLED := pyproject.toml constraints.txt hatch_build.py $(NATIVE)
STAMPS := $(VENV)/installed
# The oldest torch and frameworks that pyproject.toml accepts, in an environment of their own.
OLDEST := .venv-oldest
oldest = $(shell sed -n 's/.*"$(1)>=\([0-9.]*\).*/$(1)==\1.0/p' pyproject.toml)
OLDEST_VERSIONS = $(foreach package,torch lightning transformers accelerate,$(call oldest,$(package)))

# Names the packages on one line as they come in; warnings and errors of pip go to stderr untouched.
define install
	@echo "Installing Paceline with [$(1)] into $(VENV) (PyTorch is large: minutes the first time, then never again)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[$(1)]' \
		| awk '/^(Collecting|Processing) / { sub(/.*\//, "", $$2); split($$2, name, /[^A-Za-z0-9._-]|-[0-9]/); \
		                                     printf "%s ", name[1]; fflush() } \
		       /^Installing collected/ { printf "\nunpacking ...\n"; fflush() }'
	@mkdir -p $(STAMPS) && touch $(addprefix $(STAMPS)/,$(2))
endef

.PHONY: help demo test test-oldest lint bench docs campaign release clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/demo  ## Train on handwritten digits under four consistency models and all-reduce, and write a report with pictures.
	$(BIN)/paceline demo

# Three at a time on two cores, as tests of processes and connections wait for a third of their time.
test: lint  ## Check everything: style, types, import contracts, tests.
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-oldest: $(OLDEST)/installed  ## Run the tests with the oldest torch and frameworks that are accepted.
	$(OLDEST)/bin/python -m pytest -n 3 --dist worksteal

lint: $(STAMPS)/dev  ## Check style, formatting, strict types and import contracts.
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

campaign: $(STAMPS)/dev  ## Run the long searches for broken promises, which `make test` leaves out.
	$(BIN)/python -m pytest -m campaign -n 2 --timeout 3600
	$(BIN)/python -m pytest -m 'hypothesis and not campaign' --hypothesis-profile search -n 2 --timeout 3600
	$(BIN)/python -m tests.faults.kill_campaign --kills 1600
	$(BIN)/python -m tests.faults.kill_readers --kills 400

bench: $(STAMPS)/demo  ## Measure this machine and print a table of the numbers.
	$(BIN)/python -m benchmarks

docs: $(STAMPS)/docs  ## Build the manual into docs/_build/html.
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

release: $(STAMPS)/release  ## Build the wheel and the source package into dist, and check them in an empty environment.
	rm -rf dist
	$(BIN)/python -m build --outdir dist/built .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist && rm -r dist/built
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m venv dist/empty
	dist/empty/bin/pip install --disable-pip-version-check -q -c constraints.txt dist/*.whl
	dist/empty/bin/python tests/packaged.py
	rm -rf dist/empty

clean:  ## Remove everything that the other targets make.
	rm -rf $(VENV) $(OLDEST) $(addsuffix .so,$(NATIVE)) docs/_build report dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OLDEST)/installed: $(INSTALLED)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[dev]' $(OLDEST_VERSIONS)
	touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Paceline needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/demo: $(INSTALLED) | $(BIN)/pip
	$(call install,demo,demo)

$(STAMPS)/dev: $(INSTALLED) | $(BIN)/pip
	$(call install,dev,demo dev)

$(STAMPS)/docs: $(INSTALLED) | $(BIN)/pip
	$(call install,docs,docs)

$(STAMPS)/release: $(INSTALLED) | $(BIN)/pip
	$(call install,release,release)
