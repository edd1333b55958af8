# Everything happens in .venv; `make setup` is a prerequisite of what needs it.

.DEFAULT_GOAL := help
.PHONY: help setup train serve quick test long mutants frameworks setup-frameworks verify bench clean

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin

# What the installation was made from. The place counts too: a moved environment is no good. So do
# the packages: an editable installation does not find a new one.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(sort $(wildcard native/*))
PACKAGES := find src -type d ! -name __pycache__ | sort
STAMP := .venv/.setup-$(shell { pwd; $(PACKAGES); cat $(SOURCES); } | cksum | cut -d ' ' -f 1)
TORCH := $(shell grep '^torch==' constraints.txt)

# By environment, because that also reaches the isolated environment that builds the native
# module; pip 25.3 and later want a name of its own for that.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## create .venv and install slipstream into it, editable

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slipstream needs Python 3.11 or later; name one with PYTHON=..." >&2; exit 1; }
	@echo "setup: environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "setup: $(TORCH)"
	@# On its own: whichever build of it the index offers (CPU, CUDA) then satisfies the rest.
	@$(PIP) '$(TORCH)'
	@echo "setup: slipstream, compiled here"
	@$(PIP) --editable '.[test,train]'
	@rm -f .venv/.setup-*
	@touch $@
	@echo "setup: done"

train: setup  ## a first run: four workers train a digit classifier
	@$(BIN)/slipstream train digits --workers 4

serve: setup  ## train text classifiers as a service: http://127.0.0.1:8080 (docs/service.md); PORT=8081
	@$(BIN)/slipstream serve $(if $(PORT),--port '$(PORT)')

quick: setup  ## at work: lint, format, types, and tests near what differs (three minutes): SINCE=commit
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python tests/nearest.py $(if $(SINCE),--since '$(SINCE)')

test: setup  ## what CI runs: lint, format, types, tests
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@# Two at a time, a file each, in the order of tests/conftest.py.
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

long: setup  ## what takes too long for every commit: grids, many kills, every system
	@$(BIN)/python -m pytest -m long -n 2

mutants: setup  ## break the code on purpose (tests/mutants.toml); only some: BREAK=name ROOM=folder
	@PYTHONPATH=tests $(BIN)/python -m mutants $(if $(BREAK),--break '$(BREAK)') \
		$(if $(ROOM),--room '$(ROOM)') $(if $(AGAIN),--again) $(if $(LIMIT),--limit $(LIMIT))

# An environment of their own, because they are large; .venv's packages are seen from it.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.setup-$(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d ' ' -f 1)

$(FRAMEWORKS_STAMP): $(STAMP)
	@echo "setup: frameworks in $(FRAMEWORKS)"
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(BIN)/python -c 'import sysconfig; \
		print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(FRAMEWORKS)/lib/python3.*/site-packages)/slipstream-environment.pth
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(FRAMEWORKS)/bin/python -m pip install --quiet --quiet \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb")) \
		["project"]["optional-dependencies"]["frameworks"])')
	@rm -f $(FRAMEWORKS)/.setup-*
	@touch $@

setup-frameworks: $(FRAMEWORKS_STAMP)

frameworks: setup-frameworks  ## test the integrations with the real frameworks (1.3 GB)
	@$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile tests/frameworks

verify:  ## check the model of the shared-memory rings (needs spin)
	@verify/check.sh

bench: setup  ## dense training against DDP over shaped links (root; ten minutes)
	@$(PIP) --editable '.[bench]'
	@for rate in 200mbit 1gbit none; do \
		$(BIN)/slipstream bench conv --compare ddp,allreduce,push_pull --rate $$rate \
			--json dense-$$rate.json --plot dense-$$rate.png || exit; \
	done

clean:  ## remove caches and build products; .venv stays, the next setup refreshes it
	@rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .venv/.setup-*
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
