# Each target needs only Python >= 3.11 and pip: the environment is made on first use and kept in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-slow test-browser check bench zoo clean

demo: $(READY)
	$(BIN)/shallowdraft demo

test: $(READY)
	$(BIN)/pytest --numprocesses auto --dist worksteal

test-slow: $(READY)
	$(BIN)/pytest -m slow --numprocesses auto --dist worksteal

test-browser: $(READY)
	$(BIN)/pytest -m browser

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/cpu_engine.py

zoo: $(READY)
	$(BIN)/python recipes/zoo.py --corpus $(CORPUS)

clean:
	rm -rf .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[train,report,export,serve,cluster,dev]'
	touch $(READY)
