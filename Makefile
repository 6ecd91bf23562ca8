SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pytest, the demo or the benchmarks: make test ARGS="-k postgres".
ARGS ?=

# How many tests run at once; whatever starts a JVM takes turns (tests/turns.py).
WORKERS ?= 2

# Where the test services keep what they download.
export SEMEL_SERVICES_DIR ?= $(CURDIR)/.services

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

.PHONY: help
help: ## Print the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/demo.stamp java ## Kill a real pipeline at its worst moments and count every row (no set-up).
	$(BIN)/python -m examples.demo $(ARGS)

.PHONY: demo-service
demo-service: $(VENV)/demo.stamp java ## Kill a real FastStream service on Kafka and count every effect.
	$(BIN)/python -m examples.service_demo $(ARGS)

.PHONY: test
test: check java ## Check, then run the tests with real services; ARGS="-k name" goes to pytest.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=20 $(ARGS)

.PHONY: test-fast
test-fast: $(VENV)/dev.stamp ## Run most of what needs no service and no JVM, in about two minutes.
	$(BIN)/python -m pytest -n $(WORKERS) -m "not (spark or kafka or postgres or seaweedfs or kill or slow or soak)" \
		tests/unit tests/contracts tests/messaging/handle tests/messaging/failed tests/test_*.py \
		--deselect=tests/test_docs.py $(ARGS)

.PHONY: soak
soak: $(VENV)/dev.stamp java ## Run the tests that take minutes: random kills for a long time.
	$(BIN)/python -m pytest -m soak --basetemp=.soak $(ARGS)

.PHONY: check
check: $(VENV)/dev.stamp ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: bench
bench: $(VENV)/dev.stamp java ## Run the benchmarks and print their tables.
	$(BIN)/python -m bench $(ARGS)

.PHONY: docs
docs: $(VENV)/dev.stamp ## Write the tables of the docs from the code.
	$(BIN)/python -m docs.generate

.PHONY: venv
venv: $(VENV)/dev.stamp ## Make .venv with everything that development needs.

.PHONY: clean
clean: ## Remove .venv, the downloaded services and all caches.
	rm -rf $(VENV) .services .soak .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The development environment contains the demo's, hence the second stamp.
$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/demo.stamp $@

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,faststream,kafka]'
	@touch $@

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "semel needs Python 3.11 or newer, and there is none on PATH." >&2; \
		echo "Get it with 'apt install python3', 'brew install python' or from python.org, or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; fi
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

.PHONY: java
java:
	@major=$$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true; \
	if [ -z "$$major" ] || [ "$$major" -lt 17 ]; then \
		echo "Spark and Kafka need Java 17 or newer, and PATH has $${major:+only Java }$${major:-none}." >&2; \
		echo "Get it with 'apt install openjdk-17-jre-headless', 'brew install openjdk@17' or from adoptium.net." >&2; \
		exit 1; fi
