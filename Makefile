# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check bars soak clean
demo: $(VENV)/core  ## set up, and run the default method on the digits
	$(BIN)/fcil run

test: $(VENV)/dev  ## set up, and pass the tests
	@# a federation of real processes mostly waits: it runs beside the others, and speaks when they are done
	$(BIN)/python -m pytest -n 2 --dist loadfile -m processes tests/deployment >$(VENV)/processes.log 2>&1 & beside=$$!; trap "kill $$beside" INT TERM; \
	$(BIN)/python -m pytest -n 3 --dist worksteal; others=$$?; \
	wait $$beside; processes=$$?; cat $(VENV)/processes.log; test $$others = 0 && test $$processes = 0

check: $(VENV)/dev  ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bars: $(VENV)/dev  ## the long checks behind RESULTS.md
	$(BIN)/python -m pytest -n 0 -m bars

soak: $(VENV)/dev  ## hurt a federation of real processes more than twenty times; writes results/soak.txt
	$(BIN)/python -m tests.deployment.soak

$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ $(VENV)/core

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
