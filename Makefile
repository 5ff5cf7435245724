# make quickstart   install, train a small model on the standard library's source, and sample from it
# make test         install and run the tests
# make lint         install and check the style
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart

.PHONY: quickstart test lint clean

quickstart: .venv/installed
	@$(BIN)/python train.py --config configs/quickstart.py
	@$(BIN)/zoo generate --model $(RUN) --prompt "def " --max-tokens 200 --temperature 0.5

test: .venv/tools
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup

lint: .venv/tools
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "lint: clean"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "zoo needs Python 3.11 to 3.13; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/tools: .venv/installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf .venv .jax_cache
