# What a developer does here. `make help` lists it.

PYTHON ?= python3
VENV := .venv
# on: tables on GPUs, too (needs nvcc, and some minutes more).
CUDA ?= off
BIN := $(VENV)/bin
TOOLS_STAMP := $(VENV)/.build-tools-installed
STAMP := $(VENV)/.kvtools-installed
HOROVOD_STAMP := $(VENV)/.horovod-installed
CPP_FILES = $$(git ls-files 'kernels/*.h' 'kernels/*.cc' 'benchmarks/*.h' 'benchmarks/*.cc' 'tests/*.cc')
SOURCES := $(shell find kernels kvtools cli horovod_setup server tfplugin -type f -not -name '*.pyc') pyproject.toml CMakeLists.txt constraints.txt README.md

# Warnings are errors for those who develop here, not for those who install.
export KVTOOLS_WERROR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Of each test file the first process that reads it keeps what pytest made of it, for all that come later.
unexport PYTHONDONTWRITEBYTECODE

# One worker more than there are processors, as some tests wait for servers and processes; four at most.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist worksteal
# The C++ tests that are about threads.
CONCURRENCY_TESTS := changes_test concurrency_test device_index_test eviction_test expiry_test spill_test
# Those of one thread, in which ThreadSanitizer finds nothing.
ONE_THREAD_TESTS := distinct_keys_test float16_test index_test resp_test serving_test
OTHER_TESTS := $(filter-out $(CONCURRENCY_TESTS) $(ONE_THREAD_TESTS),$(basename $(notdir $(wildcard kernels/tests/*_test.cc))))

# For `make wheels` and `make matrix`: interpreters by version or path, and minor versions of TensorFlow; all, if empty.
PYTHONS ?=
TENSORFLOWS ?=
JOBS ?= $(shell nproc)

.PHONY: help setup setup-horovod wheels matrix demo examples test test-engine test-threads test-all test-rest test-other-threads \
  test-durations peers spark redis load-generators chromium fuzz sanitize sanitize-address lint types format bench bench-step bench-tools \
  bench-snapshot bench-serve bench-swaps bench-fresh bench-expiry bench-spill bench-export bench-saves bench-sok bench-gpu bench-install docs clean

help: ## list the targets
	@echo "Start with \`make demo\`. The first run makes $(VENV), which takes some minutes."
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/^/  make /; s/:.*## /\t/' | expand -t 23

setup: $(STAMP) ## make .venv and install everything into it

# What compiles: all that C++ tests with a sanitizer need.
$(TOOLS_STAMP): constraints.txt
	@command -v c++ >/dev/null || command -v g++ >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq g++; \
	  else echo "make: a C++ compiler is needed: install g++ and run again." >&2; exit 1; fi; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or later is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq python3-venv python3-dev && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-dev; \
	  else echo "make: Python's headers are needed: install python3-dev (python3-devel) and run again." >&2; exit 1; fi; }
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

$(STAMP): $(SOURCES) | $(TOOLS_STAMP)
	@echo "make: fetching packages and building kvtools into $(VENV): some minutes, once"
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -C build-dir=build/setup -C cmake.define.KVTABLE_WERROR=ON \
	  -C cmake.define.KVTOOLS_CUDA=$(CUDA) -C cmake.define.KVTOOLS_DEVICE_TABLE=ON -C cmake.define.KVTABLE_BUILD_TESTS=ON \
	  '.[docs,explore,formats,grpc,ray,remote,report,serve,sql,tensorflow,test]'
	$(BIN)/python -I -c 'import tfplugin'
	@touch $@

setup-horovod: $(HOROVOD_STAMP) ## build Horovod into .venv, once: training on several ranks

# Does nothing within a second where a Horovod that works is there.
$(HOROVOD_STAMP): $(STAMP)
	@echo "make: building Horovod into $(VENV) if it is not there: some minutes, once"
	$(BIN)/kvtools setup-horovod
	@touch $@

demo: setup ## train, inspect, export and serve a small model, end to end
	$(BIN)/python examples/ctr_demo.py

examples: setup setup-horovod ## run the examples, in ten minutes; EXAMPLE=name runs one
	$(BIN)/python examples/run.py $(EXAMPLE)

test: setup setup-horovod redis chromium test-engine test-threads ## what decides, in ten minutes
	$(PYTEST) -m 'not thorough' --hypothesis-profile=quick --costs=build/costs-test.jsonl

# With `make -j2`, C++ is compiled while packages are fetched and installed.
test-engine: setup
	kernels/tests/run.sh plain build/setup $(BIN)/cmake

test-threads: $(TOOLS_STAMP)
	kernels/tests/run.sh thread build/thread $(BIN)/cmake $(CONCURRENCY_TESTS)

test-all: ## everything that must pass: `make test`, and some half an hour more
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

# What test-all adds to test: the whole grids, more examples of each property, sanitizers, other engines, CUDA's compiler.
# UNTIL=TIME, in seconds since 1970, leaves out the tests that have not begun by then; their number is printed.
test-rest: setup setup-horovod redis chromium sanitize-address peers spark test-other-threads
	$(PYTEST) -m 'thorough or hypothesis' --hypothesis-profile=thorough --costs=build/costs-rest.jsonl $(if $(UNTIL),--until=$(UNTIL))

test-other-threads: $(TOOLS_STAMP)
	kernels/tests/run.sh thread build/thread $(BIN)/cmake $(OTHER_TESTS)

test-durations: ## write what each file took in the last `make test-all` into docs/testing.md
	$(BIN)/python tests/suite/durations.py docs/testing.md build/costs-test.jsonl build/costs-rest.jsonl

# Some tests are skipped without it. What apt-get installs waits for what it installed before.
redis: | $(TOOLS_STAMP)
	@command -v redis-server >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq redis-server; } || \
	  echo "make: without redis-server the tests of tables in Redis are skipped: install it to run them." >&2

load-generators:
	@{ command -v wrk && command -v redis-benchmark; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq wrk redis-tools; } || \
	  echo "make: what wrk and redis-benchmark measure is left out: install wrk and redis-tools for it." >&2

chromium: | redis
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq chromium; } || \
	  echo "make: without chromium the test of the server's page in a browser is skipped: install it to run it." >&2

peers: setup ## other engines, each in its environment, to exchange checkpoints with
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then $(BIN)/python benchmarks/peers/tfra.py >/dev/null; \
	else echo "make: TFRA has no wheels for this Python: tests that exchange checkpoints with it are skipped." >&2; fi

# Some 450 MB to fetch, and half a minute of work.
spark: setup | chromium ## Spark, to read the Parquet folders that kvtools writes
	@$(BIN)/python -c 'import pyspark' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt pyspark || \
	  echo "make: without pyspark the tests of Spark reading our Parquet are skipped." >&2
	@command -v java >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq default-jre-headless; } || \
	  echo "make: without Java the tests of Spark reading our Parquet are skipped: install a JDK 17 or later to run them." >&2

fuzz: setup ## change files at random and open them, for FUZZ_SECONDS (600)
	$(BIN)/python tests/fuzz/fuzz.py

sanitize: sanitize-address ## the C++ tests under ASan, UBSan and TSan
	kernels/tests/run.sh thread build/thread $(BIN)/cmake

sanitize-address: $(TOOLS_STAMP)
	kernels/tests/run.sh address build/address $(BIN)/cmake

lint: setup types ## style and types
	@$(BIN)/ruff check . || { echo "make lint: \`make format\` fixes some of these; change the rest by hand." >&2; exit 1; }
	@$(BIN)/ruff format --check . || { echo "make lint: run \`make format\`." >&2; exit 1; }
	@$(BIN)/mypy || { echo "make lint: mypy is strict on kvtools, cli, horovod_setup and server: add or correct the types." >&2; exit 1; }
	@$(BIN)/mypy --python-version 3.10 --no-warn-return-any --no-warn-unused-ignores || { echo "make lint: Python 3.10 does not have what mypy names." >&2; exit 1; }
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES) || { echo "make lint: run \`make format\`." >&2; exit 1; }

# cli/, horovod_setup/ and server/ install as kvtools.cli and so on: what mypy reads is a tree of links that looks like it.
types:
	@rm -rf build/types && mkdir -p build/types/kvtools
	@ln -s $(CURDIR)/kvtools/* $(CURDIR)/cli $(CURDIR)/horovod_setup $(CURDIR)/server build/types/kvtools/

format: setup ## rewrite sources in the house style
	-$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: setup ## speed, side by side, into benchmarks/results/
	$(BIN)/python benchmarks/run.py

bench-step: setup ## where the time of a training step goes, op by op
	for optimizer in SGD Adagrad Adam; do for dim in 16 64; do \
	  $(BIN)/python benchmarks/step_stages.py --optimizer $$optimizer --dim $$dim || exit 1; done; done

bench-tools: setup ## the offline tools on 4 GB, beside cat and a script by hand
	$(BIN)/python benchmarks/tools.py

bench-snapshot: setup ## lookups of snapshots beside an index in NumPy; building, opening, starting and cold keys of 100 M rows
	$(BIN)/python benchmarks/snapshot.py

bench-serve: setup redis load-generators ## the lookup server, every protocol, beside Redis MGET on the same core
	$(BIN)/python benchmarks/serve.py

bench-swaps: setup ## half an hour of new versions under load: latencies in swaps beside those of the steady state
	$(BIN)/python benchmarks/swaps.py

bench-fresh: setup ## from the end of a training step to its rows in answers of kvtools serve --follow; the price for training
	$(BIN)/python benchmarks/fresh.py

bench-expiry: setup ## what expiry beside training costs a step, beside a table that expires nothing
	$(BIN)/python benchmarks/expiry.py

bench-spill: setup ## steps with a quarter of the rows in memory, and the others in a file, beside those with all of them there
	$(BIN)/python benchmarks/spill.py

bench-export: setup ## exported models: size, load, memory, speed and AUC of each kind; the indexes; the speed of an export
	$(BIN)/python benchmarks/export_models.py

bench-saves: setup ## 20 million rows with Adam's slots saved and restored beside dd, and training beside an asynchronous save
	$(BIN)/python benchmarks/saves.py

bench-sok: setup setup-horovod ## sok.lookup_sparse on two ranks, beside hvd.alltoall alone
	$(BIN)/python benchmarks/sok.py

# On a machine with a GPU and nvcc: `make setup` is not needed there.
bench-gpu: ## on a GPU: the tests of its tables, and their speed, in nine minutes
	@PYTHON=$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) benchmarks/gpu/run.sh

wheels: ## a source distribution, and wheels for PYTHONS with ready ops for TENSORFLOWS, into dist/
	$(PYTHON) wheels/build.py --pythons '$(PYTHONS)' --tensorflows '$(TENSORFLOWS)' --jobs $(JOBS)

matrix: ## tests from the wheels in dist/ for each Python and TensorFlow; the table goes into docs/versions.md
	$(PYTHON) wheels/matrix.py --pythons '$(PYTHONS)' --tensorflows '$(TENSORFLOWS)' --jobs $(JOBS)

bench-install: ## from a wheel in dist/ to the first trained step, in environments made for it, without a compiler
	$(PYTHON) benchmarks/fresh_install.py

docs: setup ## the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/mkdocs build --strict --site-dir site

clean: ## remove builds, wheels, the environment and demo output
	rm -rf build dist $(VENV) benchmarks/peers/.venv-tfra site demo-output
