# Everything runs in a virtual environment of its own, made on first use. Needs python3 (3.11 or
# newer) and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.dev-ready
COMPILERS := $(VENV)-compilers
DEMO := $(VENV)-demo
WORKERS ?= 2
# A test is run once more if its process was ended, and never if it failed: no error matches `(?!)`.
# Eight devices on two cores wait for each other for ever now and then, and XLA ends the process.
PYTEST = -m pytest -n $(WORKERS) --dist worksteal -q --reruns 1 --only-rerun '(?!)'
# The first cells of a notebook, started from `dist`; and a proxy that is not there, for no network.
FIRST_CELLS = ../$(VENV)-wheel/bin/python ../tests/notebooks/first_cells.py
NO_NETWORK = http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9

.PHONY: help compilers compiled compiled-short demo test test-one-device test-slow test-all test-nightly lint types contract docs docs-fast notebooks wheel lowest newest clean

help:  ## this list
	@grep -E '^[a-z-]+:.*  ## ' Makefile | sed 's/:.*  ## /: /'

demo: $(DEMO)/.ready  ## the main job: adamw, lamb, lans and muonh at a small and a large batch
	$(DEMO)/bin/python examples/train_digits.py

test: $(READY)  ## the tests, without those marked slow
	$(BIN)/python $(PYTEST) -m "not slow"

test-slow: $(DEV_READY)  ## the tests marked slow and not nightly
	$(BIN)/python $(PYTEST) -m "slow and not nightly"

test-one-device: $(READY)  ## the optimizers once more, on one device, where sums are taken otherwise
	TEST_DEVICES=1 $(BIN)/python $(PYTEST) -m "not slow" \
	  tests/optimizers tests/test_golden.py tests/test_frameworks.py \
	  --ignore tests/optimizers/test_checkpoints.py

test-all: test test-one-device test-slow  ## all tests but the nightly ones

test-nightly: $(DEV_READY) compilers  ## the tests marked nightly, 2,000 compositions, what is compiled for H100s and TPUs, all tests with the lowest versions and Levanter's jax, and with the newest versions and their users' compiler
	$(BIN)/python $(PYTEST) -m nightly
	COMPOSITIONS=2000 FIRST_COMPOSITION=$$(date +%s) $(BIN)/python $(PYTEST) -m slow tests/test_compositions.py
	$(MAKE) compiled-short
	$(MAKE) lowest versions-jax-0.7
	TEST_COMPILER=usual $(MAKE) newest
	TEST_COMPILER=usual $(MAKE) newest MARK=slow

# XLA's compilers for TPUs and for NVIDIA's GPUs, 1.2 GB: wheels only, no driver, no CUDA libraries.
compilers:
	$(PYTHON) -m venv $(COMPILERS)
	$(COMPILERS)/bin/pip install --quiet --editable '.[examples,test]' 'jax[tpu]'
	version=$$($(COMPILERS)/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	$(COMPILERS)/bin/pip install --quiet --no-deps \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12

compiled: compilers  ## what XLA makes of steps for H100s and TPUs that are not there
	$(COMPILERS)/bin/python -m benchmarks.compiled_step --check
	$(COMPILERS)/bin/python -m benchmarks.compiled_muon --check

compiled-short:  ## a part of the same, if the compilers can be had
	$(MAKE) compilers || { echo "compiled-short: left out, the compilers cannot be had"; exit 0; } && \
	$(COMPILERS)/bin/python -m benchmarks.compiled_step --short --check && \
	$(COMPILERS)/bin/python -m benchmarks.compiled_muon --check --target "eight H100" \
	  --case "BERT-large stacked, layers" "BERT-large stacked, rows" --optimizer "muon, bfloat16"

lint: $(DEV_READY)  ## style, and the limits of size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.size

types: $(DEV_READY)  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

contract: $(DEV_READY)  ## imports go down the list of rooms
	$(BIN)/lint-imports

docs: $(DEV_READY)  ## the site, in docs/_build/html/index.html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -n -q -b html docs docs/_build/html

docs-fast: $(DEV_READY)  ## the site without running notebooks, as for a first look at a page
	$(BIN)/sphinx-build -W --keep-going -n -q -b html -D nb_execution_mode=off docs docs/_build/html

notebooks: $(DEV_READY)  ## runs the notebooks and keeps their outputs, a quarter of an hour
	$(BIN)/python -m docs.run_notebooks

wheel: $(DEV_READY)  ## builds the wheel, installs it where nothing else is, runs README and notebooks
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install --quiet dist/*.whl
	cd dist && ../$(VENV)-wheel/bin/python -W error -c \
	  "import optax_largebatch as lb; print(lb.__version__, len(lb.__all__), 'public names')"
	$(VENV)-wheel/bin/pip install --quiet ipython "$$(echo dist/*.whl)[examples]"
	sed -n -e '/^```python/,/^```$$/{/^```/!p}' \
	  -e '/^```diff/,/^```$$/{/^```/d;/^-/d;s/^.//p}' README.md > dist/readme.py
	cd dist && ../$(VENV)-wheel/bin/python -W error readme.py
	cd dist && for notebook in ../notebooks/*.ipynb; do \
	  $(NO_NETWORK) $(FIRST_CELLS) $$notebook || exit 1; done

# Other versions of jax hardly change these: with SHORT=1, as in CI, `lowest` and `newest` skip them.
SHORT ?=
SKIPPED = $(if $(SHORT),$(addprefix --ignore tests/,benchmarks diagnostics docs networks notebooks params \
  plans recipes schedules testing test_public_arguments.py test_command_line.py))

lowest: versions-lowest  ## the tests with the lowest versions of jax and optax that pyproject.toml claims

versions-%:  # the tests with the versions in tests/versions
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --editable '.[examples,test]' -c tests/versions/$*.txt
	$(VENV)-$*/bin/python $(PYTEST) -m "not slow" $(SKIPPED)

# The exit status of `newest` where it is left out.
LEFT_OUT ?= 0
MARK ?= not slow

newest:  ## the tests with the newest Python on the machine, and the newest jax, flax and optax
	@python=$$($(PYTHON) tests/newest_python.py); \
	if [ -z "$$python" ]; then \
	  echo "newest: left out, there is no Python above 3.11 on the path or in pyenv"; exit $(LEFT_OUT); \
	fi; \
	$$python -m venv $(VENV)-newest && \
	$(VENV)-newest/bin/pip install --quiet --upgrade --upgrade-strategy eager \
	  --editable '.[examples,test]' && \
	$(VENV)-newest/bin/python -c "import sys, flax, jax, optax; print('newest: Python', \
	  *sys.version.split()[:1], 'jax', jax.__version__, 'flax', flax.__version__, 'optax', \
	  optax.__version__)" && \
	$(VENV)-newest/bin/python $(PYTEST) -m "$(MARK)" $(SKIPPED)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[examples,test]'
	touch $(READY)

# What checks the code and builds the site, which the quick tests do without.
$(DEV_READY): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(DEV_READY)

# What the examples need and no more; modules are compiled when they are first imported.
$(DEMO)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --no-compile --editable '.[examples]'
	touch $(DEMO)/.ready

clean:
	rm -rf $(VENV) $(DEMO) $(VENV)-wheel $(VENV)-lowest $(VENV)-newest $(VENV)-jax-0.7 $(COMPILERS) dist build runs docs/_build docs/chains docs/notebooks/*.ipynb
