# `make` does what a change needs before it is committed; `make help` lists the rest. All of it runs in .venv, which is made
# on first use (for the demo with what a user needs, for the rest with everything), and again when a pin or a requirement changes.
# `make VENV=` runs in the active environment as it is.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
base := $(shell command -v $(PYTHON))
VENV ?= .venv
ARGS ?= -n auto -m 'not slow and not release'
FNAME ?= torchember

ifneq ($(VENV),)
ready := $(VENV)/.ready
usable := $(VENV)/.demo
export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

# What the comments beside arguments say goes into the docstrings
library := nbdev-export && python docs/docstrings.py

.PHONY: all sync export quick update save lint warm test gpu versions docs check wheel demo bench clean help
.NOTPARALLEL:
all: sync lint test docs # All that a change needs: sync, lint, test and docs

sync export quick update save lint warm test gpu docs check wheel bench: $(ready)
demo: $(usable)

$(VENV)/.demo: settings.ini setup.py pyproject.toml constraints.txt
	@echo "Installing PyTorch, torchember and what the demo imports into $(VENV). A minute or two, the first time; pip says what it does:"
	$(base) -m venv $(VENV)
	python -m pip install -q --upgrade pip # to one that shows how far an installation is
	python -m pip install -c constraints.txt -e '.[torch,fast,demo]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	@echo "Installing what tests and pages need into $(VENV). A few minutes, the first time:"
	python -m pip install --no-compile -c constraints.txt -e '.[dev,docs]' # most files of these packages are never imported
	python -m pip install -c constraints.txt --no-deps fastai # which would bring torchvision, of which PyPI has none for a torch without CUDA
	@touch $@

sync: # Write the library and the README from the notebooks, and clean these
	python docs/docstrings.py --notebooks
	$(library)
	nbdev-clean
	python docs/readme.py

export: # Export the changed notebooks only, in a few seconds: `make export NB=nbs/05_ground/20_record.ipynb` for one
	python docs/export.py $(NB)

quick: # Export what changed since the last commit, and run its tests, for at most a minute; NB= as in export, or a test file
	python tests/quick.py $(NB)

update: # Carry what was changed in a module back into its notebook: `make update FNAME=torchember/ember.py` for one
	python docs/docstrings.py --strip $(FNAME)
	nbdev-update --fname $(FNAME)
	@$(MAKE) --no-print-directory sync VENV=$(VENV)

save: # Run the notebooks and keep what they print: `make save NB=nbs/05_ground/20_record.ipynb` for one
	home=$$(mktemp -d) && TORCHEMBER_HOME=$$home MPLBACKEND=agg TORCHEMBER_WAIT=1 nbdev-test --save $(NB); ok=$$?; rm -rf $$home; nbdev-clean; exit $$ok

lint: # Look for mistakes in notebooks, library, tests and examples, and for private words
	ruff check
	python docs/wording.py

warm: # Compile once what all test processes load: the loops of numba, and the test files
	python tests/warm.py

# A worker, or a program that a test starts, need not compile what another one has, whatever the environment says
test: export PYTHONDONTWRITEBYTECODE :=
test: # Run the notebooks and tests/ against the library, but for the slow and what is for a release: ARGS='-n auto' for all, ARGS='-k summary' for some
	pytest $(ARGS)

gpu: # On a machine with a GPU: what is tested and measured there, into gpu-report.txt, to attach to an issue
	{ python -c "import torch; print(torch.__version__, torch.accelerator.current_accelerator(), torch.cuda.is_available() and torch.cuda.get_device_name())"; \
	pytest -q -n 4 --dist=load -rA --tb=short tests/devices/test_gpu.py tests/measure/triton_cases.py tests/frameworks/test_frameworks_on_gpu.py; python -m benchmarks gpu gpu-gpt2 --quick; } 2>&1 | tee gpu-report.txt

versions: # Run the core of the tests on other versions, with uv: ENVS='"torch==2.8.0 python=3.12" "torch pandas<3 -numba"' for some
	python3 tests/versions.py $(ENVS)

docs: # Make pages of the notebooks as they are saved: docs/_build/html/index.html
	@echo "Making the pages: each notebook with the outputs saved in it, and the report of a small training. A minute or two:"
	@sphinx-build -qWE -c docs nbs docs/_build/html
	@echo "The site is there: $(abspath docs/_build/html/index.html)"

check: # Fail unless notebooks are clean, and all that they generate is in git
	find torchember -name '*.py' ! -name __init__.py -delete # a module whose notebook is gone must not stay
	@$(MAKE) --no-print-directory sync VENV=$(VENV)
	@git --no-pager diff --stat --exit-code && new=$$(git ls-files -o --exclude-standard) && [ -z "$$new" ] || \
	{ echo "Not in git yet, or not as the notebooks say: run make sync, then git add. $$new"; exit 1; }

wheel: # Build the package into dist/, and import it where nothing else is installed
	rm -rf dist
	python -m build > /dev/null
	python -m venv --without-pip dist/bare
	python -m pip --python dist/bare install -qq --no-deps dist/*.whl
	cd dist && bare/bin/python -c "import torchember; from importlib.resources import files; (files('torchember.show.page')/'web'/'report.js').read_bytes()"

demo: # Train a small model on real data, and look inside
	python examples/digits.py

bench: # Measure what recording costs: `make bench BENCH='alexnet --quick'` for some of it
	python -m benchmarks $(BENCH)

clean: # Remove what the other targets build, but for the environment
	rm -rf build dist docs/_build .coverage* .hypothesis .pytest_cache .ruff_cache

help: # Say what each target does
	@sed -n 's/^\([a-z]*\):[^#]*# /\1\t/p' Makefile | expand -t 8
