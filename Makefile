# make train     build, then train a small model on real documents, padded and packed
# make train NPROC=2  build, then train by transformers' Trainer on two ranks, GPUs or CPUs
# make test      build, then run the fast tier of the tests
# make test-all  build, then run every test, those that build the package too
# make matrix CELL=torch213  build and test with the versions of a cell of scripts/versions.json, in an
#                environment of its own, and write what ran into docs/versions.md
# make versions  write the table of docs/versions.md again
# make tsan      build with ThreadSanitizer, then run the C++ tests of the cache
# make asan      build with AddressSanitizer, then run the C++ tests and ten minutes of the fuzzer;
#                make asan SECONDS=3600 runs it for an hour. make test-all ends with it
# make bench     build, then run the benchmarks (the published figures come from a GPU)
# make format    format the sources with clang-format and ruff; make lint checks them and the types
# make docs      build the documentation site into build/site
# make release   list what a release of the files in DIST still needs
#
# Everything happens in VENV, which is created if it does not exist. To use an environment of your
# own: make test VENV=/path/to/it

VENV ?= .venv
PYTHON ?= python3
# Those of cell `pinned` in scripts/versions.json. The newest: make test TORCH=torch
# TRANSFORMERS=transformers, with a VENV of their own.
TORCH ?= $(shell $(PYTHON) scripts/matrix.py pin pinned torch)
TRANSFORMERS ?= $(shell $(PYTHON) scripts/matrix.py pin pinned transformers)

PY := $(VENV)/bin/python

.PHONY: train test test-all matrix versions tsan asan bench format lint linters docs release build environment clean

train: build
	$(PY) $(if $(NPROC),-m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/trainer.py,examples/compare.py) $(ARGS)

test: TIER := -m "not full"
test test-all: build
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(abspath $(PY))" bash scripts/run_tests.sh $(TIER) $(ARGS)
	$(if $(filter test-all,$@),$(MAKE) asan)

matrix:
	$(PYTHON) scripts/matrix.py run $(CELL) $(if $(SET),--set $(SET)) $(if $(ARGS),-- $(ARGS))

versions:
	$(PYTHON) scripts/matrix.py page

tsan: environment
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(abspath $(PY))" bash scripts/run_thread_sanitizer.sh

SECONDS := 600
asan: environment
	PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(abspath $(PY))" bash scripts/run_address_sanitizer.sh $(SECONDS)

bench: build
	for name in metadata cache attention rope masks conv thd tree packing cp_plan training_step; do \
	  $(PY) -m benchmarks $$name $(ARGS) || exit; \
	done

CPP_FILES = git ls-files '*.cpp' '*.h' '*.cu' '*.cuh'
PYTHON_FILES := python tests benchmarks examples cmake scripts setup.py

format: linters
	$(CPP_FILES) | xargs $(VENV)/bin/clang-format -i
	$(VENV)/bin/ruff format $(PYTHON_FILES)
	$(VENV)/bin/ruff check --fix $(PYTHON_FILES)

lint: linters
	$(CPP_FILES) | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/ruff format --check $(PYTHON_FILES)
	$(VENV)/bin/ruff check $(PYTHON_FILES)
	$(VENV)/bin/mypy

linters: environment
	$(PY) -m pip install -q "clang-format==19.1.7" "ruff==0.14.5" "mypy==2.4.1"

docs: linters # ruff also formats the signatures of the API pages
	$(PY) -m pip install -q "mkdocs-material==9.8.1" "mkdocstrings[python]==1.0.8"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict -f .github/mkdocs.yml

DIST := dist
release: lint docs
	$(PY) scripts/release.py $(DIST)

build: environment
	bash scripts/build.sh "$(PY)" -q

environment:
	PYTHON="$(PYTHON)" bash scripts/environment.sh "$(VENV)" "$(TORCH)" "$(TRANSFORMERS)"

clean:
	rm -rf build dist python/*.egg-info python/cuseq/lib python/cuseq/include python/cuseq/share python/cuseq/*.so python/cuseq/_build_config.py
