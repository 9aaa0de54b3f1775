# Each target makes its own environment in .venv; nothing has to be installed beforehand but Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
# Every process of the engine imports these: where Python may not keep what it compiles, starting would take twice as long.
COMPILE = $(RUN) -m compileall -q flowengine
INSTALLING = @echo "installing into $(VENV) what '$(@:$(VENV)/.%=%)' needs: about a minute the first time"

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(RUN) -m experiments.training.run

test: lint
	$(RUN) -m pytest tests

lint: $(VENV)/.test
	$(RUN) -m ruff check flowengine tests experiments
	$(RUN) -m mypy

bench: $(VENV)/.bench
	@set -e; found=; for bench in experiments/*/run.py; do \
	  test -f "$$bench" || continue; found=1; module=$${bench%.py}; \
	  echo "== $$bench"; $(RUN) -m "$$(echo "$$module" | tr / .)"; \
	done; test -n "$$found" || echo "no experiments yet"

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) has no venv module (on Debian: apt-get install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.demo: pyproject.toml | $(RUN)
	$(INSTALLING)
	@$(PIP) install --editable '.[demo]'
	@$(COMPILE)
	@touch $@

$(VENV)/.test: pyproject.toml | $(RUN)
	$(INSTALLING)
	@$(PIP) install --editable '.[test]'
	@$(COMPILE)
	@touch $@

$(VENV)/.bench: pyproject.toml | $(RUN)
	$(INSTALLING)
	@$(PIP) install --editable '.[bench,demo]'
	@$(COMPILE)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find flowengine tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
