# Each target sets itself up in .venv on a machine with Python 3.11 or later and pip; a second call finds it there.
#
#   make demo     four claims get a verdict on this machine's CPU, in less than five minutes
#   make test     what every commit runs, in five minutes on two cores: most tests, and one real run of each kind
#   make test-all every test that needs no GPU, no Slurm and no browser
#   make targets  the trainers that plans are exported to, unpacked into .venv/targets; tests read exports back with their code
#   make test-slurm  jobs of a real Slurm, two virtual nodes on this machine; needs Debian's slurm-wlm and munge
#   make bench-tests  how long commands and searches take; on a machine that does nothing else
#   make check    lint, types, import rules, schemas, cards, skills
#   make parity   the tables of parity, anew from the tests that make the comparisons
#   make docs     the site, strictly, into site/
#   make test-browser   the site in headless Chromium (Debian: apt-get install chromium)

SHELL := /bin/sh
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SETUP := pyproject.toml constraints.txt
SOURCES := playbook app/playbook_app bench/playbook_bench trainer/playbook_trainer

# Tests of one module share what its fixtures have launched, so a module stays on one worker; modules in the order of tests/conftest.py, the longest first.
# Compiled modules are kept, whatever the environment says: tests start hundreds of processes.
# One worker more than cores, for tests wait for their ranks a quarter of the time.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $$(( $$(nproc) + 1 )) --dist loadscope --no-loadscope-reorder

.PHONY: help demo targets test test-all test-rest test-slurm test-browser bench-tests check docs parity clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.demo
	@$(BIN)/playbook demo

# Of Python 3.12 and for GPUs: unpacked, not installed. The tests themselves fetch nothing.
TARGETS := megatron-core==0.19.2 megatron-bridge==0.6.2 trl==1.16.0
# torchtitan's wheels lie in one folder, as one would install them.
TORCHTITAN := torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 tyro==1.0.17 spmd_types==0.2.3 einops==0.8.2 \
	docstring_parser==0.18.0 shtab==1.13.0 typeguard==4.6.1
DOWNLOAD := $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	--implementation cp --platform manylinux_2_28_x86_64 --platform any

targets: $(VENV)/.targets

$(VENV)/.targets: Makefile | $(VENV)/.dev
	@for release in $(TARGETS); do name=$${release%%=*}; rm -rf $(VENV)/targets/$$name && \
	$(DOWNLOAD) --dest $(VENV)/targets/wheels $$release && \
	$(BIN)/python -m zipfile -e $(VENV)/targets/wheels/$$(echo $$name | tr - _)-*.whl $(VENV)/targets/$$name || exit; done
	@rm -rf $(VENV)/targets/torchtitan* && $(DOWNLOAD) --dest $(VENV)/targets/torchtitan-wheels $(TORCHTITAN) && \
	for wheel in $(VENV)/targets/torchtitan-wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(VENV)/targets/torchtitan-0.3.0 || exit; done
	@touch $@

test: $(VENV)/.dev $(VENV)/.targets
	$(PYTEST)

test-rest: $(VENV)/.dev $(VENV)/.targets
	$(PYTEST) -m full

test-all: test test-rest

test-slurm: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slurm tests/whole/slurm

bench-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -m benchmark tests/test_benchmarks.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/playbook schemas export --check
	$(BIN)/playbook cards check
	$(BIN)/playbook skills check
	$(BIN)/python tools/names.py
	$(BIN)/python tools/planted_faults.py --check

parity: $(VENV)/.dev
	rm -f docs/parity/models.jsonl docs/parity/layouts.jsonl docs/parity/megatron.jsonl
	PLAYBOOK_PARITY=docs/parity $(BIN)/python -m pytest tests/trainer/torch/model/test_parity_decoder.py tests/trainer/torch/parallel/test_layouts.py \
		tests/trainer/megatron/test_models.py

docs: $(VENV)/.dev
	$(BIN)/playbook site build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -n $$(nproc) --dist worksteal -m browser tests/site

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Debian ships Python without ensurepip; there the outer pip puts a pip into the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later on PATH; install one, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.demo: $(SETUP) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large; this takes a minute or two)"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(SETUP) | $(BIN)/python
	@echo "installing tests, linters and the site generator into $(VENV)"
	@$(PIP) -e '.[train,dev,docs]'
	@touch $@ $(VENV)/.demo

$(VENV)/.browser: $(VENV)/.dev
	@$(PIP) -e '.[browser]'
	@touch $@
