# make quickstart   install, train a small model on the standard library's source, and sample from it
# make test         install and run the tests
# make test-aot     install the compilers of TPU and GPU and compile kernels and training steps with them; no chip needed
# make lint         install and check the style
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart

.PHONY: quickstart test test-aot lint clean

quickstart: .venv/installed
	@$(BIN)/python train.py --config configs/quickstart.py
	@$(BIN)/zoo generate --model $(RUN) --prompt "def " --max-tokens 200 --temperature 0.5

test: .venv/tools
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup

test-aot: .venv-aot/installed
	@.venv-aot/bin/python -m pytest -q -n 2 --dist worksteal tests/aot

lint: .venv/tools
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "lint: clean"

.venv/bin/python .venv-aot/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "zoo needs Python 3.11 to 3.13; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/tools: .venv/installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

# Apart from .venv, where JAX would go looking for the chips.
.venv-aot/installed: pyproject.toml constraints.txt | .venv-aot/bin/python
	@echo "Installing into .venv-aot ..."
	@.venv-aot/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test,aot]"
	@touch $@

clean:
	rm -rf .venv .venv-aot .jax_cache
