PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Everything that decides what is installed; a change of one of these installs again.
INPUTS := setup.cfg setup.py pyproject.toml constraints.txt $(wildcard cext/*.c cext/*.h)

.PHONY: demo test test-all lint dev clean

demo: dev
	$(BIN)/python tools/demo.py

# A process for each core, but not more than 4: each takes up to 1.2 GB and makes its own checkpoints. The tests of a file
# stay together, as what they share is made once a process.
test: dev
	$(BIN)/python -m pytest -q -m "not slow" -n logical --maxprocesses 4 --dist loadfile

# One after the other: among the slow ones are those that measure, and those that take much memory.
test-all: dev
	$(BIN)/python -m pytest -q

# mypy finds the package through a directory that holds it under its own name.
lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/mypy && ln -sfn ../.. build/mypy/deltafin
	MYPYPATH=build/mypy $(BIN)/mypy -p deltafin.cext -p deltafin.cli -p deltafin.indexer -p deltafin.store -p deltafin.runtime \
		-m deltafin -m deltafin.errors -m deltafin.__main__
	MYPYPATH=build/mypy $(BIN)/mypy tools

dev: $(VENV)/.installed

$(VENV)/.installed: $(INPUTS)
	$(PYTHON) -c 'import sys; sys.exit("Deltafin needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info $(VENV)
