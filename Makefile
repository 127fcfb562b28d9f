# Each target makes the virtual environment that it needs, from pyproject.toml and the requirements files beside it.

PYTHON ?= python3
ROUNDS ?= 50
PYTHONS = $(foreach version,3.9 3.10 3.11 3.12 3.13,$(if $(shell .ci/find-python $(version)),$(version)))

.DEFAULT_GOAL := help
# Kept between runs, though only patterns name them.
.PRECIOUS: .venv-3.%/.ready

.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z0-9.%-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo:  ## see a server die, and its rank leave with the reason
	PYTHONPATH=. $(PYTHON) examples/demo.py

.PHONY: demo-torchrun
demo-torchrun: .venv-torch/.ready  ## the same under torchrun: killed once, and killed once with a restart left
	.venv-torch/bin/python examples/demo_torchrun.py

.PHONY: test
test: .venv/.ready  ## the suite, on PYTHON (python3)
	.venv/bin/python -m pytest -m "not torch"

.PHONY: test-all
test-all:  ## the suite, on every Python from 3.9 to 3.13 on PATH or under pyenv
	@failed=; for version in $(PYTHONS); do $(MAKE) test-$$version || failed="$$failed $$version"; done; \
	if [ -n "$$failed" ]; then echo "failed on:$$failed"; exit 1; fi

test-3.%: .venv-3.%/.ready  ## the suite, on one of them
	.venv-3.$*/bin/python -m pytest -m "not torch"

.PHONY: test-torch
test-torch: .venv-torch/.ready  ## the tests with real torch, on Python 3.11
	.venv-torch/bin/python -m pytest -m torch tests/torch

.PHONY: bench
bench: .venv-bench/.ready  ## what it costs and how fast it is, into benchmarks/ and the README; ROUNDS=50
	.venv-bench/bin/python benchmarks/run.py --rounds $(ROUNDS)

.PHONY: pythons
pythons:  ## which Pythons test-all finds
	@echo $(PYTHONS)

.PHONY: lint
lint: .venv/.ready  ## ruff: rules and format
	.venv/bin/ruff check
	.venv/bin/ruff format --check

.PHONY: format
format: .venv/.ready  ## let ruff mend what it can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

.PHONY: types
types: .venv/.ready  ## mypy --strict
	.venv/bin/mypy --strict watchdog $(wildcard examples benchmarks)

.PHONY: clean
clean:  ## remove the virtual environments, caches and builds
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call environment,PYTHON,WHAT TO INSTALL)
define environment
	rm -rf $(@D)
	$(1) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
	@touch $@
endef

.venv/.ready: pyproject.toml requirements-lint.txt
	$(call environment,$(PYTHON),-e ".[test]" -r requirements-lint.txt)

.venv-torch/.ready: pyproject.toml requirements-torch.txt
	$(call environment,"$$(.ci/find-python 3.11)",-e ".[test]" -r requirements-torch.txt)

# With torch where there is a Python 3.11 and an index that has it; what needs torch is left out otherwise.
.venv-bench/.ready: pyproject.toml requirements-torch.txt
	$(call environment,"$$(.ci/find-python 3.11 || command -v $(PYTHON))",-e ".[bench]")
	@.ci/find-python 3.11 >/dev/null && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt || \
	echo "benchmarks without torch"

.venv-3.%/.ready: pyproject.toml
	$(call environment,"$$(.ci/find-python 3.$*)",-e ".[test]")
