# Every command a contributor needs. The first one on a fresh machine makes .venv from the pinned requirements and compiles
# the native engine in place; later ones do only what is out of date. pip asks the package index that pip is configured for.
#
#   make demo ARGS="--damage"        pass arguments on
#   make test PYTHON=python3.12      another interpreter (also: VENV=/elsewhere/venv)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3 || echo python3)
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
# The environment of vLLM has torch and transformers too: where it is, it serves both.
TORCH_VENV ?= $(if $(wildcard $(VLLM_VENV)/.installed),$(VLLM_VENV),.venv-torch)
ARGS ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
NEWS := { grep -v '^Requirement already satisfied' || true; }
PYTEST := $(PY) -m pytest
NATIVE_FORMATTED = $(wildcard kvxfer/native/*.[ch] kvxfer/native/*/*.[ch] kvxfer/native/*/*.cc kvxfer/bench/*.[ch] tests/native/*.[ch] tests/native/*/*.[ch] tests/native/*/*.cc benchmarks/*/*.[ch])
PYTHON_FORMATTED := kvxfer tests examples benchmarks tools setup.py

export PYTHONFAULTHANDLER := 1

.PHONY: help build demo demo-ascend-sim check check-static system-packages test test-debug test-asyncio test-uvloop torch-env test-torch vllm-env test-vllm sim soak cases cases-full fuzz analyze sanitize check-aarch64 bench bench-compare bench-peers format clean distclean

help: ## what there is
	@echo "usage: make <target> [ARGS=...] [PYTHON=...] [VENV=...]"
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/' | expand -t 18

# -- environment: three stamps, each made again when the file that pins it changes ------------------------------------

$(VENV)/.made: tools/preflight.py
	@command -v $(PYTHON) >/dev/null || { echo "kvxfer: no $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) tools/preflight.py
	@if ! $(PIP) --version >/dev/null 2>&1; then echo "== making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); fi
	@touch $@

$(VENV)/.runtime: requirements/runtime.txt requirements/build.txt $(VENV)/.made
	@echo "== installing what kvxfer needs to run and to be compiled"
	@$(PIP) install -r requirements/runtime.txt -r requirements/build.txt | $(NEWS)
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	@echo "== installing the tools of tests and checks"
	@$(PIP) install -r requirements/dev.txt | $(NEWS)
	@touch $@

# -- build ------------------------------------------------------------------------------------------------------------

# setuptools compares times itself, so this is quick when nothing changed; the command `kvxfer` is installed once.
build: $(VENV)/.runtime ## compile the native engine in place and install the command kvxfer into the venv
	@echo "== compiling the native engine"
	@$(PY) setup.py --quiet build_ext --inplace
	@$(MAKE) --silent --no-print-directory $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.runtime
	@echo "== installing the command kvxfer into $(VENV)"
	@PYTHONWARNINGS=ignore $(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# -- use --------------------------------------------------------------------------------------------------------------

demo: build ## prefill in one process, decode in another, compare every token (ARGS="--help" lists the options)
	@$(PY) examples/demo.py $(ARGS)

# Simulated accelerators, of a directory of their own that is gone afterwards. No figure of it is a figure of hardware.
demo-ascend-sim: build ## the same between two simulated Ascend cards (needs g++; nothing it prints is about hardware)
	@libraries=$$($(PY) -m tests.native.ascend_sim.build) && place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT
	@KVXFER_CANN_LIBDIR=$$libraries KVXFER_SIM_DIR=$$place $(PY) examples/demo.py --memory hbm --transports hixl $(ARGS)
	@! grep FAULT $$place/sim.log

bench: build ## measure our transports beside plain copies and sockets: `kvxfer bench` (ARGS are passed on)
	@$(VENV)/bin/kvxfer bench $(ARGS)

bench-compare: build ## the same beside other data movers, judged by the goals (ARGS="--compare nixl,ucx --json FILE --html FILE")
	@$(PY) -m benchmarks.compare $(ARGS)

bench-peers: $(VENV)/.made ## environments for the data movers of `make bench-compare` (ARGS="nixl ucx" chooses)
	@$(PY) benchmarks/peers/install.py $(ARGS)

# -- check ------------------------------------------------------------------------------------------------------------

# Every step runs, so that one look shows all that is wrong.
check-static: build $(VENV)/.dev
	@failed=; step() { echo "== $$1"; shift; "$$@" || failed=1; }
	step "ruff format" $(PY) -m ruff format --check --quiet --diff $(PYTHON_FORMATTED)
	step "ruff" $(PY) -m ruff check $(PYTHON_FORMATTED)
	step "mypy --strict" $(PY) -m mypy --strict
	step "clang-format" $(VENV)/bin/clang-format --dry-run --Werror $(NATIVE_FORMATTED)
	if tools/system-packages --has clang; then step "static analysis" $(PY) -m tools.analyze; fi
	step "source rules" $(PYTEST) -q tests/test_sourcecode.py
	step "names for tests alone" $(PY) -m tools.unused
	[ -z "$$failed" ]

check: check-static ## formats, lint, types, source rules, then the quick tests
	@echo "== quick tests"; KVXFER_TEST_LOOP=asyncio $(PYTEST) -q -m "not once and not slow" --deselect tests/test_sourcecode.py $(ARGS)

# Always two things side by side, one of them into a file: two modes, then the two halves of the third. Tests between real processes
# mostly wait, the others mostly compute.
# What is left out for want of a system package is named at the end, with the command to get it.
PROCESS_TESTS := tests/adversity tests/cases
test: system-packages check-static ## checks, the suite in three event loop modes, torch, then the sanitizers
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT
	failed=
	beside() { # the second command waits for nothing but itself; the first one's output is shown when both have ended
	    $$1 >"$$log" 2>&1 & local other=$$!
	    $$2 || failed=1
	    wait $$other || failed=1
	    cat "$$log"
	}
	debug() { $(MAKE) --no-print-directory test-debug; }
	uvloop() { $(MAKE) --no-print-directory test-uvloop; }
	processes() { $(MAKE) --no-print-directory test-asyncio ARGS="$(PROCESS_TESTS) $(ARGS)"; }
	others() { $(MAKE) --no-print-directory test-asyncio ARGS="$(PROCESS_TESTS:%=--ignore=%) $(ARGS)"; }
	beside debug uvloop
	beside others processes
	if $(MAKE) --no-print-directory torch-env; then
	    $(MAKE) --no-print-directory test-torch || failed=1
	else
	    echo "SKIPPED [all] $(TORCH_TESTS): the environment of torch cannot be made here (make torch-env)"
	fi
	[ -z "$$failed" ]
	$(MAKE) --no-print-directory sanitize
	tools/system-packages --missing
	echo "== all passed"

# torch and transformers have an environment of their own (1.2 GB). kvxfer is there by its path, as it was built here. An index without CPU
# builds of torch needs a second one, by pip's own PIP_EXTRA_INDEX_URL.
TORCH_TESTS := tests/integrations/test_torch.py tests/integrations/test_real_model.py tests/integrations/vllm/test_caches.py
$(TORCH_VENV)/.torch: requirements/torch.txt
	@echo "== making $(TORCH_VENV)"
	@[ -x $(TORCH_VENV)/bin/python ] || $(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/torch.txt
	@echo "$(CURDIR)" >"$$($(TORCH_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvxfer.pth"
	@$(TORCH_VENV)/bin/python -c 'import kvxfer, torch, transformers'
	@touch $@

torch-env: build $(TORCH_VENV)/.torch ## the environment of `make test-torch`: torch on the CPU and transformers beside kvxfer (1 min, 1.2 GB)

test-torch: torch-env ## caches of torch tensors, and a real transformer prefilled and decoded in two processes
	@echo "== torch"
	@KVXFER_TEST_LOOP=asyncio HF_HUB_OFFLINE=1 $(TORCH_VENV)/bin/python -m pytest -q --durations=4 $(TORCH_TESTS) $(ARGS)

# vLLM has an environment of its own (2.5 GB): it pins its own torch and numpy. kvxfer is there by its path, as it was built here.
$(VLLM_VENV)/.installed: requirements/vllm.txt
	@echo "== making $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/vllm.txt
	@echo "$(CURDIR)" >"$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvxfer.pth"
	@$(VLLM_VENV)/bin/python -c 'import kvxfer, vllm'
	@touch $@

vllm-env: build $(VLLM_VENV)/.installed ## the environment of `make test-vllm`: vLLM on the CPU beside kvxfer (1 min, 2.5 GB)

test-vllm: vllm-env $(VENV)/.dev ## prefill and decode engines of vLLM over kvxfer (FULL=1: the whole matrix)
	@echo "== vLLM"
	@KVXFER_TEST_LOOP=asyncio TEST_VLLM_PYTHON=$(VLLM_VENV)/bin/python KVXFER_TEST_FULL=$(FULL) $(PYTEST) -q --durations=8 tests/integrations/vllm/engines $(ARGS)

system-packages: ## what the tests want beside Python, gcc and make: installed where that is allowed, else named
	@tools/system-packages

# What no event loop can change runs in the mode `asyncio` only (tests/conftest.py says how that is known).
test-asyncio test-debug test-uvloop: build $(VENV)/.dev
	@echo "== tests, loop mode $(@:test-%=%)"
	@KVXFER_TEST_LOOP=$(@:test-%=%) $(PYTEST) -q --durations=8 $(ARGS)

SEEDS ?= 1000
sim: build ## play SEEDS new seeds of simulated clusters, and all that ever failed (ARGS="--help" lists the options)
	@$(PY) -m tests.support.sim --seeds $(SEEDS) --jobs $$(nproc) --file tests/sim/seeds.txt $(ARGS)

cases: build $(VENV)/.dev ## the case book: what users of such systems met (ARGS="-k c08" chooses)
	@KVXFER_TEST_LOOP=asyncio $(PYTEST) -q --durations=8 tests/cases $(ARGS)

cases-full: build $(VENV)/.dev ## the same with the long versions, at their full numbers (for the night)
	@KVXFER_TEST_LOOP=asyncio KVXFER_TEST_FULL=1 $(PYTEST) -q --durations=8 tests/cases tests/adversity/test_cancel_pattern.py tests/adversity/test_frozen.py $(ARGS)

soak: MINUTES ?= 30
soak: build ## mixed traffic with faults for MINUTES at full speed; fails when anything grows (ARGS="--seed N" replays)
	@$(PY) -m tests.support.soak --minutes $(MINUTES) $(ARGS)

fuzz: MINUTES ?= 5
fuzz: build $(VENV)/.dev ## coverage-guided fuzzing for MINUTES (needs clang and its libFuzzer; ARGS="--keep" updates the corpora)
	@$(PY) -m tests.fuzz.long --minutes $(MINUTES) $(ARGS)

analyze: $(VENV)/.made ## static analysis of all native code by clang (files that were clean and did not change are left out)
	@$(PY) -m tools.analyze $(ARGS)

sanitize: $(VENV)/.made ## the native code alone under address, undefined-behaviour and thread sanitizers
	@$(PY) tests/native/sanitize/run.py

check-aarch64: build $(VENV)/.dev ## cross-compile all native code for aarch64, run its C tests in an emulator
	@echo "== aarch64"; $(PY) -m tests.native.aarch64.run $(ARGS)

format: $(VENV)/.dev ## rewrite Python and C files in the project's format
	@$(PY) -m ruff format $(PYTHON_FORMATTED)
	@$(PY) -m ruff check --fix $(PYTHON_FORMATTED)
	@$(VENV)/bin/clang-format -i $(NATIVE_FORMATTED)

clean: ## remove what was built (the venv stays)
	rm -rf build dist tests/native/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f kvxfer/native/*.so $(VENV)/.installed
	find kvxfer tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the venv and the environments of peers
	rm -rf $(VENV) $(TORCH_VENV) $(VLLM_VENV) .bench-peers *.egg-info
