# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
BENCH_BIN := .venv-bench/bin
INSTALLED := .venv/.installed
# One more than there are cores, because tests often wait for processes.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, os.cpu_count() + 1))')
DEMO_INSTALLED := .venv/.demo_installed
BENCH_INSTALLED := .venv-bench/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test soak mutations lint package notebooks bench docs serve-docs generate clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv (other targets do so when needed)

demo: $(DEMO_INSTALLED) ## train a small GPT with hooks, in half a minute
	$(BIN)/hookline demo

test: $(INSTALLED) ## run the test suite, on all cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

soak: $(INSTALLED) ## kill and resume a training 200 times, many more random cases, and what make test leaves out
	$(BIN)/python tests/support/kill_and_resume.py --kills 200
	folder=$$(mktemp -d) && $(BIN)/python tests/support/interrupted_sessions.py 300 $$folder; \
		failed=$$?; rm -r $$folder; exit $$failed
	$(BIN)/python -m pytest -p soak -q -n $(WORKERS) tests
	$(BIN)/python -m pytest -p linted_runs -q -n $(WORKERS) --dist loadfile \
		$(addprefix tests/,hooks trainer loop integrations updates probes trackers runs verification)

mutations: $(INSTALLED) ## make known mistakes in copies of the code, and check that tests find each
	$(BIN)/python tools/mutations.py

lint: $(INSTALLED) ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

package: $(INSTALLED) ## build the wheel, check it, and run the README's example from it
	rm -rf dist .venv-package
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv --without-pip .venv-package
	$(BIN)/python -m pip --python .venv-package/bin/python install --quiet --no-deps dist/*.whl
	$(BIN)/python tools/link_dependencies.py .venv-package
	.venv-package/bin/python tools/readme_example.py
	rm -rf .venv-package

notebooks: $(INSTALLED) ## run the notebooks and store what they print
	$(BIN)/python tools/run_notebooks.py

bench: $(BENCH_INSTALLED) ## compare with other libraries (in .venv-bench)
	$(BENCH_BIN)/python -m bench

docs: $(INSTALLED) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

serve-docs: $(INSTALLED) ## serve the documentation locally
	$(BIN)/mkdocs serve

generate: $(INSTALLED) ## rewrite the files that are derived from the code
	$(BIN)/python tools/generate.py

clean: ## remove everything that make created, including the virtual environments
	rm -rf .venv .venv-bench .venv-package site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so that an interrupted install starts again.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@echo "Installing what the demo needs into .venv (the first time takes a minute) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[report]'
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into .venv (the first time takes a few minutes) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH_INSTALLED): pyproject.toml constraints.txt bench/requirements.txt
	@echo "Installing into .venv-bench (the first time takes a few minutes) ..."
	test -x $(BENCH_BIN)/python || $(PYTHON) -m venv .venv-bench
	$(BENCH_BIN)/python -m pip install --quiet -c constraints.txt -e . -r bench/requirements.txt
	@touch $@
