# StableRL. `make help` lists the targets.
#
# PYTHON=python3.12 make book     another interpreter for the new environment
# VENV=path make book             an environment you already have; nothing is installed into it

SHELL := /bin/bash
PYTHON ?= python3

ifeq ($(origin VENV),undefined)
VENV := .venv
READY := $(VENV)/.installed
endif

PY := $(VENV)/bin/python
SITE := _build/.built
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
SITE_SOURCES := $(shell find book notebooks -type f -not -path "book/assets/vendor/*" \
    -not -path "book/_generated/*" -not -path "*/.ipynb_checkpoints/*" -not -path "*/__pycache__/*" 2>/dev/null) \
    _config.yml _toc.yml stablerl_core/runlog.py $(wildcard results/*.json)
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg \
    --nbval-cell-timeout=120 -n 2 --dist loadfile
# Progress bars and model hubs stay silent; a notebook must use the inline plot backend.
QUIET := env -u MPLBACKEND TQDM_DISABLE=1 HF_HUB_OFFLINE=1

.PHONY: help book test lab execute lint bench base lock clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1|/' | column -t -s '|'

$(VENV)/.installed: requirements.lock pyproject.toml tests/oracles.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -r requirements.lock
	$(PY) -m pip install -e . --no-deps
	$(PY) -m pip install --no-deps --upgrade --target $(VENV)/oracles -r tests/oracles.txt
	@touch $@

# The whole site is rebuilt each time: a page left from an earlier build would hide its warnings.
$(SITE): $(READY) $(SITE_SOURCES)
	rm -rf _build
	$(PY) book/build_assets.py
	$(VENV)/bin/jupyter-book build . -W -n --keep-going
	@touch $@

book: $(SITE)  ## build the site into _build/html
	@echo "Open _build/html/index.html"

lint: $(READY)  ## style, imports and the rules of who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

test: $(READY) lint $(SITE)  ## lint, the tests of package, site and notebooks, and nbval
	TQDM_DISABLE=1 HF_HUB_OFFLINE=1 $(PY) -m pytest $(PYTEST_ARGS)
	$(if $(NOTEBOOKS),$(QUIET) $(PY) -m pytest $(NBVAL) $(NOTEBOOKS))

lab: $(READY)  ## open the notebooks in JupyterLab
	$(VENV)/bin/jupyter lab notebooks

execute: $(READY)  ## run every notebook again and keep its new outputs
	$(QUIET) $(PY) -m jupyter nbconvert --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False $(NOTEBOOKS)
	$(QUIET) $(PY) -m jupyter nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS)

bench: $(READY)  ## speed and memory against other libraries, side by side
	$(PY) benchmarks/run.py

base: $(READY)  ## train the base model again and compare it with the one shipped
	$(PY) -m stablerl_core.training.base

lock: $(READY)  ## write requirements.lock from the environment
	{ echo "# The exact set that the book was executed with. Made by \`make lock\`; do not edit by hand."; \
	  $(PY) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > requirements.lock

clean:  ## remove everything that was built, except the environment
	rm -rf _build book/_generated book/assets/vendor tests/site/_shots
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
