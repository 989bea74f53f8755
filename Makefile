# make demo: the main job on real images.   make test: everything CI checks.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

.PHONY: demo test test-all lint fuzz clean
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,test,lint]"
	touch $@

demo: $(VENV)/.installed
	$(PY) -m bench.demo $(ARGS)

test: $(VENV)/.installed lint
	$(PY) -m pytest -n 2 -m "not thorough" $(ARGS)

test-all: $(VENV)/.installed lint
	$(PY) -m pytest -n 2 $(ARGS)

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fuzz: $(VENV)/.installed
	$(PY) -m tests.fuzz $(ARGS)

clean:
	rm -rf $(VENV) out
