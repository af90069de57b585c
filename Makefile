# make demo: text from the bundled model.   make test: the CPU test suite.   make lint, make fmt: style and types.
# All work in .venv, which is made when it is missing and refreshed when pyproject.toml changes.

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
            $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
PROMPT ?= Once upon a time
ARGS   ?=

.PHONY: demo test lint fmt clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	@echo "== The bundled model nano goes on from: $(PROMPT)"
	@$(BIN)/bluejay generate "$(PROMPT)" --model nano --max-new-tokens 120 --temperature 0.8 --top-p 0.95 --seed 7

test: $(VENV)/installed-dev
	@echo "== Running the CPU test suite"
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

lint: $(VENV)/installed-dev
	@echo "== Checking style and types"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "Bluejay needs Python 3.11 or newer; found: $$(python3 --version 2>&1)."; \
	  echo "Install one, or name it: make demo PYTHON=/path/to/python3.11"; exit 1; fi
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "Bluejay needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)."; exit 1; fi
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "This Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; fi
	@echo "== Making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	@echo "== Installing Bluejay and PyTorch into $(VENV) (some minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	@echo "== Installing Bluejay, PyTorch and the development tools into $(VENV) (some minutes the first time)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed
