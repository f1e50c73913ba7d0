# The whole life of a checkout. `make` alone lists the targets.
#   ARGS    more arguments for the command: make run ARGS="--size 4GiB", make test ARGS="-k odirect"
#   PYTHON  the interpreter (default: 3.13, 3.12, 3.11 or 3.14, the first found)
#   VENV    the virtual environment (default: .venv)

VENV ?= .venv
ARGS ?=
bin = $(VENV)/bin
runtime = $(VENV)/.iobench-runtime
development = $(VENV)/.iobench-development
dlio = $(VENV)-dlio/.iobench-dlio

# The tests import the same modules in many processes, so that caching what was compiled pays.
test test-all quick test-dlio: export PYTHONDONTWRITEBYTECODE =

# A test that ends its worker would end one worker after the other: xdist runs it again in the next.
parallel = -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help run test test-all quick test-dlio test-peers check fmt docs setup clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

run: $(runtime) ## set up, then measure llama7b on this machine with three writers
	$(bin)/iobench run --workload llama7b $(ARGS)

test: $(development) ## set up, then run the tests, three at a time (ARGS="-n 0": one)
	$(bin)/python -m pytest $(parallel) -m "not exhaustive" $(ARGS)

test-all: $(development) ## the same with more cases: random kills, schedules, file systems
	$(bin)/python -m pytest $(parallel) $(ARGS)

quick: $(development) ## the unit tests that take milliseconds: under a minute in all
	$(bin)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/unit $(ARGS)

test-dlio: $(dlio) ## test the DLIO integration with real DLIO, in an environment of its own
	$(VENV)-dlio/bin/python -m pytest tests/integration/test_dlio.py $(ARGS)

test-peers: $(development) ## compare other projects' checkpoint tests with and without iobench exec
	$(bin)/python scripts/test-peers $(ARGS)

check: $(development) ## format, lint and types, changing nothing
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy

fmt: $(development) ## format and sort imports
	$(bin)/ruff check --select I --fix .
	$(bin)/ruff format .

docs: $(development) ## build the docs site into site/; a broken link fails
	$(bin)/python -m sphinx -W --keep-going -q -c docs . site $(ARGS)
	@echo "docs: open site/index.html"

setup: $(development) ## make the virtual environment and install what the tests need

$(runtime): pyproject.toml constraints.txt scripts/setup
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/setup run
	@touch $@

$(development): pyproject.toml constraints.txt scripts/setup
	VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/setup test
	@touch $(runtime) $@

$(dlio): pyproject.toml constraints.txt scripts/setup scripts/dlio.txt
	VENV="$(VENV)-dlio" PYTHON="$(PYTHON)" scripts/setup dlio
	@touch $@

clean: ## remove the virtual environment and caches; results stay
	for venv in "$(VENV)" "$(VENV)-dlio"; do \
	    if [ -e "$$venv/pyvenv.cfg" ]; then rm -rf "$$venv"; fi; done
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site *.egg-info
	find $(wildcard iobench tests benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
