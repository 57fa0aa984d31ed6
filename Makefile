# Everything runs inside .venv, which is made on demand from $(PYTHON) and brought up to date when
# pyproject.toml, constraints.txt or the interpreter's folder changes. Nothing else is installed anywhere.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Quiet twice: errors only.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt
# What a plain test run leaves out: mutants take their own time, see `make mutants`.
SELECT ?= not mutation
# Further arguments for pytest, as in: make test ARGS="-k lock -x"
ARGS   ?=

# Stamps: newer than what they depend on means done. DEV covers RUNTIME.
MADE    := $(VENV)/.made
RUNTIME := $(VENV)/.installed
DEV     := $(VENV)/.installed-dev
WANTED  := pyproject.toml constraints.txt
# What ours is measured beside, in an environment of its own: as published, with the little that it needs here.
VERL    := benchmarks/.verl-venv
PEER    := verl==0.9.1

.DEFAULT_GOAL := help
# One after the other, also under `make -j`: pip works alone, the cheapest check comes first, and the tests
# watch the clock.
.NOTPARALLEL:
.PHONY: help install dev demo test quick lint types format coverage diagrams outcomes bench-core bench-lint bench-handlers bench-samehost explore twins mutants chaos clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------------------------------------- installing

$(MADE):
	@command -v $(PYTHON) >/dev/null || { \
		echo "weightsync: no '$(PYTHON)' here; name a Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "weightsync: needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "weightsync: '$(PYTHON)' lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): $(MADE) $(WANTED)
	@echo "installing weightsync into $(VENV); the first time takes a while (torch, Ray)"
	@$(INSTALL) --editable .
	@touch $@

$(DEV): $(MADE) $(WANTED)
	@echo "installing weightsync and what its checks need into $(VENV); the first time takes a while (torch, Ray)"
	@$(INSTALL) --editable '.[dev]'
	@touch $(RUNTIME) $@

install: $(RUNTIME) ## .venv with the weightsync command in it

dev: $(DEV) ## the same, with what lint, types and tests need

# --------------------------------------------------------------------------------------------------- running

demo: $(RUNTIME) ## install, then watch a small policy learn while its weights are handed over
	@$(BIN)/weightsync demo

diagrams: $(RUNTIME) ## write the checked-in diagrams anew from the tables
	$(BIN)/weightsync diagram --write diagrams

outcomes: $(DEV) ## write docs/outcomes.md anew: what becomes of a round, for each fault in each state
	PYTHONPATH=tests/support $(BIN)/python -m casekit.outcomes_page docs/outcomes.md

bench-core: $(RUNTIME) ## measure the machine, and an empty round over Ray beside the frame of the field
	$(BIN)/python -m benchmarks.core

bench-lint: $(RUNTIME) ## measure what linting a log of ten thousand rounds costs
	$(BIN)/python -m benchmarks.lint

bench-handlers: $(RUNTIME) ## measure what the trainer's handlers cost, as ratios; ARGS="--check" holds them to their budgets
	$(BIN)/python -m benchmarks.handlers $(ARGS)

# Without it the benchmark runs as well, and says that it is not there.
$(VERL)/.installed: constraints.txt
	@echo "installing $(PEER) into $(VERL), to be measured beside"
	@{ $(PYTHON) -m venv $(VERL) && \
		$(VERL)/bin/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt \
			torch numpy packaging pyzmq && \
		$(VERL)/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps $(PEER) && \
		touch $@; } || echo "weightsync: $(PEER) could not be installed; measuring without it" >&2

bench-samehost: $(RUNTIME) $(VERL)/.installed ## measure hand-overs on one host beside torch, gloo and verl; ARGS="--quick"
	$(BIN)/python -m benchmarks.samehost $(ARGS)

# -------------------------------------------------------------------------------------------------- checking

test: $(DEV) lint types ## lint, types, all tests, and at least 95 % branch coverage of the core
	$(BIN)/python -m coverage run --source fsm -m pytest -m '$(SELECT)' $(ARGS)
	$(BIN)/python -m coverage report --include 'fsm/*' --fail-under 95

quick: $(DEV) ## only the tests that take no time
	$(BIN)/python -m pytest -m 'not slow and not ray and not chaos and not mutation' $(ARGS)

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(DEV) ## mypy --strict on library and tests
	$(BIN)/mypy src tests $(wildcard benchmarks examples)

format: $(DEV) ## let ruff repair what it can; what it cannot, `make lint` tells
	$(BIN)/ruff check --fix --exit-zero --quiet
	$(BIN)/ruff format

coverage: $(DEV) ## all tests, then the whole report, also as htmlcov/index.html
	$(BIN)/python -m coverage run -m pytest -m '$(SELECT)' $(ARGS)
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

explore: $(RUNTIME) ## every misfortune at every step, up to three engines, and a thousand games drawn by lot
	$(BIN)/weightsync check --wide
	$(BIN)/weightsync check --seeds 1000

twins: $(DEV) ## break each promise twice: an ordinary test must notice, and is named
	$(BIN)/python -m pytest -m twins -q -s $(ARGS)

mutants: $(DEV) ## break everything there is, row by row: some minutes
	$(BIN)/python -m pytest -m mutation $(ARGS)

chaos: $(DEV) ## 500 rounds with faults on real processes; ARGS="--rounds N --seconds S --seed K"
	PYTHONPATH=tests/support $(BIN)/python -m chaoskit $(ARGS)

clean: ## remove what builds and runs left, but not .venv
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## and .venv as well
	rm -rf $(VENV) $(VERL) src/weightsync.egg-info
