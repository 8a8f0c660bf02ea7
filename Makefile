# Every target that needs the environment makes it first (tools/bootstrap.sh; under two seconds when it exists).
# The project is run from this folder and not installed: the environment is shared between checkouts.
PYTHON ?=
ARGS ?=
# Processes that run tests; 0: the one that was started, which a debugger can stop.
WORKERS ?= $(if $(filter 1,$(shell nproc)),0,2)
BOOTSTRAP = tools/bootstrap.sh $(if $(PYTHON),--python '$(PYTHON)')
RUN = PYTHONPATH='$(CURDIR)' .venv/bin/python
BENCHMARKS = $(sort $(patsubst benchmarks/%.py,benchmarks.%,$(wildcard benchmarks/[a-z]*.py)))

.PHONY: help setup demo test lint bench clean

help:
	@echo 'make demo     set up, then watch a small model learn with stale rollouts (minutes, no GPU needed; ARGS="SEED FOLDER")'
	@echo 'make test     set up, then run the tests, on two cores (WORKERS=0: on one); ARGS="-k name" selects,'
	@echo '              ARGS="-m fast" those without another process or an engine (under two minutes on two free cores)'
	@echo 'make setup    only set up: .venv becomes a link to the pinned environment in the cache folder'
	@echo 'make lint     ruff and mypy'
	@echo 'make bench    the measurements in benchmarks/'
	@echo 'make clean    remove tool caches from this folder (runs/ and the environments in ~/.cache/megatron_vcpo stay)'
	@echo 'PYTHON=/path/to/python3.12 names the interpreter to set up with; otherwise it is searched for'

setup:
	@$(BOOTSTRAP)

demo: setup
	@bash examples/llama/demo.sh $(ARGS)

test: setup
	@$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

bench: setup
	@set -e; for module in $(BENCHMARKS); do echo "== $$module"; $(RUN) -m $$module; done

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
