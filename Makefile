# One set of commands for people and CI. `make setup` is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
NEWEST := .venv-newest
FLEET := .venv-fleet
# The newest that installs; the oldest that is supported: make test-fleet FLOWER=1.30.0 FLEET=.venv-fleet-1.30
FLOWER ?= 1.41.0

.PHONY: setup test lint types tests test-lowest test-newest test-fleet docs wheel-check release demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e ".[dev]"
	touch $(STAMP)

test: lint types docs tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

tests: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal

# What the bounds in pyproject.toml promise: the core and PyTorch at the lowest versions that they allow.
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(LOWEST) $(LOWEST)/bin/python -m uv pip install --quiet --resolution lowest-direct \
		-e ".[torch,report,watch,nvml]" "pytest>=8.2" "pytest-timeout>=2.3" "pytest-xdist>=3.5" "hypothesis>=6.100"
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $$(nproc) -W default tests/test_*.py tests/device tests/measure \
		tests/predict tests/planning tests/control tests/store tests/runlog tests/jobs \
		--deselect tests/test_docs.py --deselect tests/test_docs_site.py -k "not exported_names"

# Flower wants older companions than the rest: an environment of its own. Processes, TLS and a killed node are in it.
test-fleet:
	test -x $(FLEET)/bin/python || $(PYTHON) -m venv $(FLEET)
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 flwr==$(FLOWER) -e ".[demo]" \
		"pytest>=8.2" "pytest-timeout>=2.3" "pytest-xdist>=3.5" "hypothesis>=6.100"
	OMP_NUM_THREADS=1 $(FLEET)/bin/python -m pytest -n $$(nproc) --dist worksteal -W default tests/fleet

# The newest versions that there are, whatever constraints.txt names; PyTorch as pinned.
test-newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		torch==2.13.0 -e ".[dev]"
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $$(nproc) --dist worksteal

# Warnings are errors, and so is a link that leads nowhere.
docs: setup
	rm -rf out/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky -c docs . out/docs
	@echo "The site is in out/docs/index.html."

wheel-check: setup
	.ci/wheel-check $(BIN)/python

# All checks, the wheel in dist/, and the tag; CONTRIBUTING says what comes before and after.
release: test wheel-check
	test -z "$$(git status --porcelain)"
	mkdir -p dist
	cp out/wheel/underwatt-*.whl dist/
	git tag "v$$($(BIN)/python -c 'import underwatt; print(underwatt.__version__)')"

demo: setup
	$(BIN)/underwatt demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist out/docs out/wheel
