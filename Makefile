# `make demo` and `make test` need Python 3.11+, git and make; all else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo serve test check format protos clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	@echo 'Installing into $(VENV); torch is large, this takes some minutes the first time.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## one answer, then the burst workload under static and continuous batching, on a real model
	$(BIN)/tokenmill demo

serve: $(INSTALLED)  ## executor and scheduler in the foreground, on the default model
	$(BIN)/tokenmill serve all

test: $(INSTALLED)  ## all tests
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## lint, types, import fences, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python tools/generate_protos.py --check
	$(BIN)/python -m tools.settings_tables --check
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml docker-compose.cuda.yml

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED)  ## regenerate the code beside the .proto files
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python tools/generate_protos.py

clean:  ## remove what was installed and built
	rm -rf $(VENV) build dist executor/tokenmill_executor/cpu/_kernels_*.so
