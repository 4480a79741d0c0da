# make demo    the main job on the demo model, with the throughput table
# make test    ruff, mypy and the tests: what CI runs
# make lint    ruff and mypy alone;  make format  mends what ruff can mend
# make bench   the host cost of planning and landing a step
# make clean   remove what make and the tools wrote here (the demo model stays in the user's cache)
#
# The first call sets up .venv against constraints.txt; PYTHON=... chooses the interpreter.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
LOG := $(VENV)/setup.log

.PHONY: demo test lint format bench clean setup moved
.DELETE_ON_ERROR:

demo: setup
	@$(RUN) -m cbatch demo

# One OpenMP thread: on two busy cores, two wait for each other more than they compute (the longest test took 224 s
# with one, over 300 s with two).
test: export OMP_NUM_THREADS ?= 1
test: lint
	@$(RUN) -m pytest -q

lint: setup
	@$(RUN) -m ruff check --quiet
	@$(RUN) -m ruff format --check --quiet
	@$(RUN) -m mypy -p cbatch

format: setup
	@$(RUN) -m ruff check --quiet --fix
	@$(RUN) -m ruff format

bench: setup
	@$(RUN) -m pytest -q benchmarks/host_cost.py --benchmark-columns=median,iqr,max

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(INSTALLED)

# The stamp holds the folder it was made for: a tree that was moved or copied is installed again.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
$(INSTALLED): moved
endif

# A .venv of an interrupted or other setup is completed if its Python is in range, else made anew.
$(INSTALLED): pyproject.toml constraints.txt
	@fail() { echo "cbatch setup: $$*" >&2; exit 1; }; \
	ok='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; \
	rm -f $(INSTALLED); \
	if ! { $(RUN) -c "$$ok" && { $(RUN) -m pip --version || $(RUN) -m ensurepip; }; } >/dev/null 2>&1; then \
		[ -n "$(PYTHON)" ] || fail "no Python 3.11 to 3.13 on the PATH; install one, or name it: make PYTHON=/path/to/python3.12"; \
		$(PYTHON) -c "$$ok" 2>/dev/null || fail "$(PYTHON) is not a Python 3.11 to 3.13; name another: make PYTHON=/path/to/python3.12"; \
		$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || fail "$(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv"; \
		$(PYTHON) -m venv --clear $(VENV) || fail "$(PYTHON) -m venv $(VENV) failed"; \
	fi; \
	echo "Setting up $(VENV), which takes some minutes (log: $(LOG))"; \
	$(RUN) -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[demo,dev]' >$(LOG) 2>&1 || { \
		if grep -qiE 'connection|resolution|retry|timed out|could not fetch|SSL' $(LOG); then why='no network to the package index?'; \
		elif grep -qi 'no space left' $(LOG); then why='the disk is full'; \
		else why="$$(grep -m 1 '^ERROR' $(LOG) || tail -n 1 $(LOG))"; fi; \
		fail "pip install failed: $$why (log: $(LOG))"; \
	}; \
	echo "$(CURDIR)" >$(INSTALLED)
