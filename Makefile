# Needs python3 (3.11 or newer) and make. Everything else goes into .venv, made on first use.
#
#   AGENTCACHE_BACKEND=cuda make demo     on Linux: use the CUDA build of MLX instead of the CPU one
#   make test ARGS="tests/kv -x"          ARGS goes to pytest, `agentcache demo`, `agentcache bench` or the tools
#   make benchmarks ARGS="batched --quick"

VENV ?= .venv
ARGS ?=
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
BIN := $(VENV)/bin

# On a Mac mlx brings Metal. Elsewhere exactly one back end may be installed: they share a file.
ifeq ($(shell uname -s),Darwin)
BACKEND := metal
EXTRAS := [plots]
DEV_EXTRAS := [dev]
else ifeq ($(AGENTCACHE_BACKEND),cuda)
BACKEND := cuda
EXTRAS := [cuda,plots]
DEV_EXTRAS := [cuda,dev]
else
BACKEND := cpu
EXTRAS := [cpu,plots]
DEV_EXTRAS := [cpu,dev]
endif

# MLX's CPU build carries the reference BLAS; with OpenBLAS in front float32 products run many times faster. Optional.
ifeq ($(BACKEND),cpu)
OPENBLAS := $(firstword $(wildcard \
	/usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib/*/openblas-openmp/libopenblas.so.0 \
	/usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0 /usr/lib/libopenblas.so.0))
endif
# Tests compare bit for bit, also what was computed in chunks of other sizes. On newer Xeons OpenBLAS has kernels that round
# a row differently by the number of rows beside it; those of Haswell, which any processor with AVX2 runs, do not.
ifneq ($(shell grep -m 1 -o avx2 /proc/cpuinfo 2>/dev/null),)
STEADY := OPENBLAS_CORETYPE=$${OPENBLAS_CORETYPE:-Haswell}
endif
ifneq ($(OPENBLAS),)
RUN := LD_PRELOAD="$(OPENBLAS)$${LD_PRELOAD:+:$$LD_PRELOAD}"
endif

VENV_STAMP := $(VENV)/made-for-$(BACKEND)
INSTALL_STAMP := $(VENV)/installed
DEV_STAMP := $(VENV)/installed-dev
# Clients that tests drive, in environments of their own: what they pin binds nobody else.
CLIENTS := $(VENV)/clients
# Registries that do not answer must not hold up the tests.
FOR_A_WHILE := $(if $(shell command -v timeout),timeout 600)
PYTHON_CLIENTS_STAMP := $(CLIENTS)/python/installed
NODE_CLIENTS_STAMP := $(CLIENTS)/node/installed
PYTHON_AGENTS_STAMP := $(CLIENTS)/agents/installed
# Coding agents in Python need a newer one than agentcache does.
NEWER_PYTHON = $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 $(wildcard \
	$(HOME)/.pyenv/versions/3.1[234]*/bin/python),$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo $(name))))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The distribution is agentcache-mlx. pip leaves one that was installed under its former name beside it, and a later
# uninstall of that one would take the command along.
REMOVE_FORMER = if $(BIN)/python -m pip show --quiet agentcache >/dev/null 2>&1; then \
	$(BIN)/python -m pip uninstall --quiet --yes --disable-pip-version-check agentcache; fi

.PHONY: help demo test test-all lint types bench benchmarks clients install clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(INSTALL_STAMP) ## several durable agents on the embedded model, with a restart in between
	$(RUN) $(BIN)/agentcache demo $(ARGS)

# Three processes with one BLAS thread each, for two cores: most tests are short and single-threaded, and for a quarter of
# the time they wait for files and servers. Each begins with a third of the tests in their order, so that what a file or a
# folder shares is made once; who is done takes half of what another has left.
# Bytecode is kept, whatever the environment says: the processes that tests start would all compile the package anew.
PYTEST := OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(STEADY) $(RUN) $(BIN)/python -m pytest -q -n 3 --dist worksteal --durations=12

# Random tests try a tenth of their examples here, all of them in test-all. Files are in RAM where there is room: a sixth
# of the time went to waiting for a disk. In test-all they are on it.
test: $(DEV_STAMP) ## run the tests, but for the long ones
	@temp=$$([ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}')" -gt 4000000 ] 2>/dev/null \
	  && mktemp -d /dev/shm/agentcache-test-XXXXXX); trap 'rm -rf "$$temp"' EXIT; \
	$(PYTEST) -m "not slow" $${temp:+--basetemp="$$temp/pytest"} $(ARGS)

# Tests of clients that cannot be had here are skipped, and say so.
test-all: $(DEV_STAMP) ## run all tests, random ones with all examples
	-@$(MAKE) --no-print-directory --keep-going clients
	$(PYTEST) --hypothesis-profile=thorough $(ARGS)

lint: $(DEV_STAMP) ## check style and that imports only go down the floors
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(DEV_STAMP) ## check types
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests

bench: $(INSTALL_STAMP) ## time to first token: cold, warm and hot
	$(RUN) $(BIN)/agentcache bench $(ARGS)

benchmarks: $(INSTALL_STAMP) ## the tools that are not installed: make benchmarks ARGS=overhead (no ARGS: list them)
	$(RUN) $(BIN)/python -m benchmarks $(or $(ARGS),--help)

clients: $(PYTHON_CLIENTS_STAMP) $(NODE_CLIENTS_STAMP) $(PYTHON_AGENTS_STAMP) ## install the SDKs and coding agents that test-all drives

install: $(INSTALL_STAMP) ## make .venv with agentcache in it (editable)

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv made for another back end is thrown away, never mixed.
$(VENV_STAMP):
	@test -n "$(PYTHON)" || { echo "agentcache needs Python 3.11 or newer: python3 is $$(python3 --version 2>&1)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "agentcache needs Python 3.11 or newer: $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALL_STAMP): $(VENV_STAMP) pyproject.toml
	@$(REMOVE_FORMER)
	$(PIP) -e ".$(EXTRAS)"
	@touch $@

$(PYTHON_CLIENTS_STAMP): tests/clients/requirements.txt | $(VENV_STAMP)
	$(PYTHON) -m venv $(CLIENTS)/python
	$(FOR_A_WHILE) $(CLIENTS)/python/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(NODE_CLIENTS_STAMP): tests/clients/package.json | $(VENV_STAMP)
	@command -v npm >/dev/null || { echo "no npm here: coding agents are not tested" >&2; exit 1; }
	mkdir -p $(CLIENTS)/node && cp $< $(CLIENTS)/node/
	$(FOR_A_WHILE) npm install --silent --no-fund --no-audit --prefix $(CLIENTS)/node
	@touch $@

$(PYTHON_AGENTS_STAMP): tests/clients/python-agents.txt | $(VENV_STAMP)
	@test -n "$(NEWER_PYTHON)" || { echo "no Python 3.12 here: coding agents in Python are not tested" >&2; exit 1; }
	for package in $$(grep -v '^#' $<); do own=$(CLIENTS)/agents/$${package%%=*}; $(NEWER_PYTHON) -m venv $$own && \
		$(FOR_A_WHILE) $$own/bin/python -m pip install --quiet --disable-pip-version-check $$package || exit 1; done
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) pyproject.toml
	@$(REMOVE_FORMER)
	$(PIP) -e ".$(DEV_EXTRAS)"
	@touch $(INSTALL_STAMP) $@
