# Everything a developer types. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Each stamp marks an installed set of dependencies. If pyproject.toml is newer, make installs the
# set again.
# `dev-all` includes `dev`, and `dev` includes `embedded`. Without `dev-all`, tests that need its packages
# are skipped by name.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
ALL_STAMP := $(VENV)/.installed-all
DOCS_STAMP := $(VENV)/.installed-docs
DEMO_DIR := var/demo
# Each process has its own server, and mostly waits for events. With `--dist worksteal`, an idle
# process takes tests from a busy one.
PARALLEL ?= -n 6 --dist worksteal
# Tests that use no server run once. So do tests that start Spark: tests/integration covers the
# commands that they send to a server.
SPARK := tests/spark tests/acceptance/test_spark.py
SERVERLESS := $(addprefix --ignore=,$(SPARK) tests/acceptance/test_packaging.py)
SERVER ?= valkey
SERVERS := redis7 redis62 redis82
PARTS ?= $(if $(ACL),,tests/contract tests/faults) tests/integration tests/acceptance

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Keep .pyc files, even if PYTHONDONTWRITEBYTECODE is set. Without them, each pytest process rewrites
# every test, and each daemon that a test starts compiles all of streamqd.
export PYTHONDONTWRITEBYTECODE :=
# Pytest compiles tests itself. In a clean clone, each of its processes would do that.
define COMPILE
@$(BIN)/python -m compileall -q streamqd tests/support
@ls tests/unit/__pycache__/*$$($(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')-pytest-* \
	>/dev/null 2>&1 || \
	echo tests/unit tests/contract tests/acceptance tests/integration tests/faults tests/pages | \
	xargs -n 3 -P 2 $(BIN)/pytest --collect-only -qq >/dev/null 2>&1 || true
endef

# Java for Spark: the tests are too short for the optimizing compiler, and their sessions load the same
# classes. Java silently ignores an archive that it cannot use.
SPARK_CLASSES := $(VENV)/spark/classes.jsa
LIGHT_JAVA := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable
test-spark: export SPARK_LAUNCHER_OPTS := $(LIGHT_JAVA)
test-spark: export SPARK_SUBMIT_OPTS := $(LIGHT_JAVA) -XX:SharedArchiveFile=$(abspath $(SPARK_CLASSES))
test-spark: export SPARK_HOME := $(abspath $(dir $(SPARK_CLASSES)))

# A test that needs a package of dev-all fails where all should be installed.
test-all test-slow test-spark: export STREAMQD_TEST_ALL := 1

.DEFAULT_GOAL := help
.PHONY: help install-all run serve test test-all test-slow test-spark test-server image lint format docs bench soak verify lock build clean

help:
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## Run the demo on 10,000 log lines
	@$(BIN)/python -m streamqd.examples.demo --dir $(DEMO_DIR)

serve: $(RUN_STAMP) ## Run the demo with the web console until Ctrl-C
	@$(BIN)/python -m streamqd.examples.demo --dir $(DEMO_DIR) --serve

test: $(DEV_STAMP) ## Run what a change needs before a push, in 4 minutes (PYTEST_ARGS="-k lease" selects)
	$(COMPILE)
	$(BIN)/pytest $(PARALLEL) --quick $(PYTEST_ARGS)

install-all: $(ALL_STAMP) # What every test and every check needs

test-all: $(ALL_STAMP) ## Run every test, on every server and as the users of etc/acl, in an hour
	@status=0; \
	for part in test test-slow test-spark "test-server ACL=1" $(SERVERS:%="test-server SERVER=%"); do \
		$(MAKE) --no-print-directory $$part || status=1; \
	done; \
	exit $$status

test-slow: $(ALL_STAMP) # Tests that `make test` leaves out, except those of Spark
	$(COMPILE)
	$(BIN)/pytest $(PARALLEL) --slow $(addprefix --ignore=,$(SPARK)) $(PYTEST_ARGS)

test-spark: $(ALL_STAMP) $(SPARK_CLASSES) ## Run the Spark tests
	@status=0; for part in $(SPARK); do $(BIN)/pytest $$part $(PYTEST_ARGS) || status=1; done; exit $$status

test-server: $(DEV_STAMP) ## Run the server tests on SERVER=redis7|redis62|redis82|testcontainers (ACL=1, PARTS=)
	$(COMPILE)
	$(BIN)/pytest $(PARALLEL) --server $(SERVER) $(if $(ACL),--acl) $(PARTS) $(SERVERLESS) $(PYTEST_ARGS)

ifneq ($(filter redis62 redis82,$(SERVER)),)
test-server: .cache/servers/$(SERVER)/redis-server
endif
ifeq ($(SERVER),testcontainers)
test-server: image
test-server: export STREAMQ_TEST_IMAGE := streamqd-test-server
test-server: PARALLEL := -n 0
test-server: PARTS := tests/contract
endif

image: $(DEV_STAMP)
	PYTHON=$(BIN)/python tests/support/make_image.sh streamqd-test-server

lint: $(ALL_STAMP) ## Check style, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DOCS_STAMP) ## Write the generated pages and build the site (NAME=shots|transcripts: from live runs)
ifeq ($(NAME),shots)
	$(BIN)/python -m tests.pages.shots
else ifeq ($(NAME),transcripts)
	$(BIN)/python -m tests.support.top_transcript
	$(BIN)/python -m tests.support.systemd_transcript
else
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going --fresh-env docs var/site
	@echo "the site: file://$(CURDIR)/var/site/index.html"
endif

# Benchmarks that are not modules of tests/benchmarks.
bench-survival := -m tests.benchmarks.peers.survival
bench-page := -m tests.benchmarks.peers.page
bench-growth-page := -m tests.benchmarks.growth --page
bench-costs := -m pytest $(wildcard tests/integration/test_costs*.py)

bench: $(ALL_STAMP) ## Run a benchmark: NAME=peers (default)|quick|bounds|costs|growth|scale... (ARGS=--help)
	@$(if $(filter %page,$(NAME)),$(BIN)/python -m pip install --quiet --editable '.[bench]')
	$(if $(filter costs,$(NAME)),COSTS=1) $(BIN)/python \
		$(or $(bench-$(NAME)),-m tests.benchmarks.$(or $(NAME),peers)) $(ARGS)

soak: $(ALL_STAMP) ## Run the long tests, or NAME=spark|backfill|memory|nemesis|kill-points|console|hygiene
	@$(if $(filter-out spark memory nemesis kill-points,$(or $(NAME),hygiene)), \
		$(BIN)/python -m pip install --quiet --editable '.[soak]' || echo "gRPC is left out" >&2)
	$(BIN)/python -m tests.soak $(NAME)

verify-mutants := -m tests.mutants
verify-model := -m tests.protocol
verify-model-full := -m tests.protocol --full --write
verify-faults := -m tests.faults
verify-faults-page := -m tests.faults --page
verify-simulation := -m tests.simulation
verify-audit := tests/support/audit.py var/audit
ifeq ($(NAME),faults)
verify: .cache/servers/redis62/redis-server
endif
VERIFY := mutants model model-full faults faults-page simulation audit

verify: $(ALL_STAMP) ## Run NAME=mutants|model|model-full|faults|simulation|audit (ARGS=)
	@$(if $(filter $(NAME),$(VERIFY)),,echo "NAME is one of: $(VERIFY)" >&2; exit 2)
	$(BIN)/python $(verify-$(NAME)) $(ARGS)

lock: $(DEV_STAMP) ## Write etc/requirements.lock: the newest allowed dependencies, by hash
	$(BIN)/python -m pip install --quiet pip-tools
	printf '# %s\n' 'Dependencies of the daemon, pinned by hash: pip install --require-hashes -r etc/requirements.lock' \
		'Written by make lock.' > etc/requirements.lock
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --no-header --no-annotate --strip-extras \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --output-file - pyproject.toml \
		>> etc/requirements.lock

build: $(DEV_STAMP) ## Build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean: ## Remove build output, caches and the virtual environment
	rm -rf $(VENV) .cache var dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "streamqd needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo missing). Set PYTHON:" \
			"make PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' does not work here. On Debian: apt-get install python3-venv" >&2; \
		exit 1; }

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[embedded,console]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(RUN_STAMP)

$(ALL_STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[dev-all]'
	@touch $@ $(DEV_STAMP) $(RUN_STAMP)

$(DOCS_STAMP): pyproject.toml $(ALL_STAMP)
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

# Without Java, the Spark tests are skipped.
$(SPARK_CLASSES): $(ALL_STAMP)
	@mkdir -p $(@D)
	@SPARK_SUBMIT_OPTS="$(LIGHT_JAVA)" $(BIN)/python -m tests.support.spark_classes $(@D) >$@.log 2>&1 || true

.cache/servers/%/redis-server: | $(DEV_STAMP)
	@$(BIN)/python tests/support/fetch_server.py $*
