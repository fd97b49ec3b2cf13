# Every target makes its own set-up: a .venv with the versions that constraints.txt pins.
VENV := .venv
BIN := $(VENV)/bin
# A process for each core; those that have done their tests take over tests of others.
# Whole files are dealt out in the order of collection, kernels' first.
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready
# Of ptxemu's tests: programs with known hazards, copies and barriers, tensor cores. Seconds.
SMOKE := $(addprefix ptxemu/tests/,check/test_hazard_programs.py check/test_litmus.py engines \
	tensor_cores/test_wgmma.py tensor_cores/test_tcgen05_mma.py)

# Or every process of the tests would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo kernels wheel dist test-wheel test test-all test-gpu test-ptxemu test-peers test-integrations test-training test-transformers peer-signatures test-newest test-pages test-slow fingerprints lint resolve fmt bench mutate docs docs-version constraints clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

$(READY): pyproject.toml ptxemu/pyproject.toml constraints.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)
	@touch $@

setup: $(READY)  ## Make .venv with everything that the other targets need

demo: $(READY)  ## A DSA layer learns real text on this machine (two minutes); writes out/demo.png
	$(BIN)/python -m examples.demo

test: $(READY)  ## flashdsa's and the workbench's tests that need no GPU, none marked slow; few of ptxemu's
	$(PYTEST) tests workbench/tests $(SMOKE)

test-ptxemu: $(READY)  ## ptxemu's own tests, none marked slow; records that they passed
	$(BIN)/python tools/ptxemu_suite.py

test-peers: $(READY)  ## Kernels of other packages, run and checked by ptxemu (installs them)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable './ptxemu[peers]'
	$(PYTEST) -m slow ptxemu/tests/peers

test-integrations: $(READY)  ## Contracts of Megatron-Core, vLLM, SGLang, flashinfer-bench, by their wheels (400 MB)
	tools/test_integrations.sh $(VENV) .integrations

test-training: $(READY)  ## TRL, PEFT and accelerate over enabled models (installs 300 MB beside .venv)
	tools/test_training.sh $(VENV) .training

test-transformers: $(READY)  ## transformers' own common tests over enabled models (its source archive, 11 MB)
	$(BIN)/python tools/transformers_tests.py .transformers $(TRANSFORMERS_TESTS)

peer-signatures: $(READY)  ## Which parameters do the adapters' peers have now? (downloads their newest wheels)
	$(BIN)/python tools/peer_signatures.py

test-newest: $(READY)  ## transformers' tests with the newest releases, if some were not tried yet (seconds otherwise)
	$(BIN)/python tools/dependencies.py newest

test-pages: $(READY)  ## Each page's commands, where only what the page installs is installed (some GB)
	$(BIN)/python -m tools.run_pages

test-slow: $(READY)  ## The tests marked slow
	$(PYTEST) -m slow

fingerprints: $(READY)  ## Has any kernel other instructions than tests/fingerprints.txt records?
	$(BIN)/python tools/fingerprints.py

lint: $(READY)  ## Format, lint, types, import rules, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/lint-imports --no-cache --config ptxemu/pyproject.toml
	$(BIN)/codespell

resolve: $(READY)  ## Can all be installed from the registry, on every Python and torch that is promised?
	$(BIN)/python tools/dependencies.py check

fmt: $(READY)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: $(READY)  ## Compile the GPU kernels into src/flashdsa/_kernels/ (some ten minutes; needs gcc)
	$(BIN)/python tools/build_kernels.py

wheel: kernels  ## A wheel with the compiled kernels, for machines without a compiler; dist/*.whl
	rm -rf build/bdist.* dist/flashdsa-*.whl
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python tools/check_wheel.py dist/flashdsa-*.whl

dist: wheel  ## What a release has: also ptxemu's wheel and both source distributions; dist/
	rm -f dist/ptxemu-* dist/flashdsa-*.tar.gz
	$(BIN)/uv build --quiet --sdist --out-dir dist .
	$(BIN)/uv build --quiet --out-dir dist ptxemu
	$(BIN)/uv tool run --quiet twine check --strict dist/*

test-wheel: $(READY)  ## A wheel with few kernels, installed where neither CuTe DSL nor a compiler is
	$(BIN)/python -m pytest -m slow tests/wheel

test-all: test test-slow test-ptxemu test-peers test-integrations test-training test-transformers test-newest test-pages  ## All tests that need no GPU (hours)

test-gpu: $(READY)  ## The tests that need a GPU, here on one
	$(BIN)/python -m pytest -m gpu

bench: $(READY)  ## Measure the CPU backend; writes JSON and a chart under workbench/results/
	$(BIN)/flashdsa bench all

mutate: $(READY)  ## Break the CPU backend, and kernels' synchronisation: is it noticed?
	$(BIN)/python -m workbench.mutation.cpu_backend
	$(BIN)/python -m workbench mutate

docs: $(READY)  ## Build the documentation into site/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict
	$(BIN)/mkdocs build --strict --config-file ptxemu/mkdocs.yml --site-dir ../site/ptxemu

docs-version: $(READY)  ## Add this version's documentation to those on the local branch gh-pages
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mike deploy --update-aliases "$$($(BIN)/python -c 'import flashdsa as f; print(f.__version__.rpartition(".")[0])')" latest
	$(BIN)/mike set-default latest

constraints: $(READY)  ## Pin all dependencies in constraints.txt, as the registry resolves them
	$(BIN)/python tools/dependencies.py pin

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build ptxemu/build site out .mypy_cache .ruff_cache .pytest_cache .hypothesis
