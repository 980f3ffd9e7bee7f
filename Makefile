# Everything is run through here; the environment is .venv at the root. Needs python3 >= 3.11 with venv, and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
STUBS := .venv/.stubs
PROTOS := $(shell find proto -name '*.proto')
BENCH_JSON ?= bench.json
PEERS_JSON ?= bench-peers.json
LAST_RELEASE = $(shell git describe --tags --abbrev=0 --match "v*" 2>/dev/null)

.PHONY: help demo up down test test-long aot docker-test check lint type proto bench peers format

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {printf "  make %-12s %s\n", $$1, $$2}'

demo: $(STUBS) ## start everything, stream from several adapters in one batch, check the result, stop
	@$(BIN)/python -m demo.run

up: $(STUBS) ## start everything and leave it running
	@$(BIN)/veneer up

down: $(STUBS) ## stop what `make up` started
	@$(BIN)/veneer down

test: $(STUBS) ## every suite but the slow tests, with the time that each took
	@$(BIN)/python tests/run.py

test-long: $(STUBS) ## every suite with the slow tests
	@$(BIN)/python tests/run.py --long

aot: $(INSTALLED) ## compile the GPU kernels without a GPU and check the code; TRITON=3.6.0 takes that version
	@other=$(if $(TRITON),$$($(BIN)/python tests/other_versions.py triton $(TRITON))); \
		$(if $(TRITON),PYTHONPATH=$$other) $(BIN)/python -m kernels.aot

docker-test: $(STUBS) ## build the images, start compose.yaml, try it from outside, take it down
	@$(BIN)/python -m pytest -m docker tests/docker -s -q

check: lint type ## lint and types: what must pass before a commit

lint: $(STUBS) ## style, layers and the API's files
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo 'run: make format'; exit 1; }
	@$(BIN)/lint-imports --no-logo > .venv/layers.log || { cat .venv/layers.log; exit 1; }
	@$(BIN)/buf lint
	@test -z '$(LAST_RELEASE)' || $(BIN)/buf breaking --against '.git#tag=$(LAST_RELEASE)'
	@$(BIN)/buf format --diff --exit-code > .venv/buf.log || { cat .venv/buf.log; echo 'run: make format'; exit 1; }
	@echo 'lint: ok'

type: $(STUBS) ## mypy --strict
	@$(BIN)/mypy

format: $(STUBS) ## format the code and the API's files, write docs/settings.md and docs/adapters.md
	@$(BIN)/python docs/settings.py
	@$(BIN)/python docs/adapters.py
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write

proto: $(INSTALLED) ## generate the API's code
	@$(BIN)/python proto/generate.py
	@touch $(STUBS)

bench: $(STUBS) ## measure the engine; writes bench.json
	@$(BIN)/python -m benchmarks.engine --json $(BENCH_JSON)

peers: $(STUBS) ## measure beside vLLM, transformers and peft; installs vLLM once; writes bench-peers.json
	@$(BIN)/python -m benchmarks.peers --json $(PEERS_JSON)

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'make: $(PYTHON) must be Python 3.11 or newer; name another one with PYTHON=…'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv (minutes on the first run) …'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt hatchling grpcio-tools mypy-protobuf
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[local,oracle,dev]'
	@touch $@

$(STUBS): $(INSTALLED) $(PROTOS) proto/generate.py
	@$(BIN)/python proto/generate.py
	@touch $@
