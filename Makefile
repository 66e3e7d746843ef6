# Everything a developer types. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A stamp says which dependencies are installed; it is older than pyproject.toml when they changed.
# `dev` includes `embedded`, so whoever has the first has the second.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
REDIS62 := .cache/servers/redis62/redis-server
REDIS82 := .cache/servers/redis82/redis-server
DEMO_DIR := var/demo
# What does not touch a server need not be run again on another one; nor do the tests that start
# Spark: what they say to a server is tested without it in tests/integration.
CLUSTER := tests/acceptance/test_spark.py
SERVERLESS := tests/unit tests/test_house.py tests/pages tests/acceptance/test_packaging.py \
	tests/spark $(CLUSTER)
ON_SERVER := $(addprefix --ignore=,$(SERVERLESS))
# What speaks with a server directly: `make test-redis62 PARTS="$(ROLES)"` leaves whole daemons out.
ROLES := tests/contract tests/integration
PARTS ?= tests
# Each process of these has a server of its own; most of them wait for events most of the time. In the
# order of tests/conftest.py, which begins with the long files: by default those with few tests, and
# they are long, would come last, and two processes would have nothing to do at the end.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help run serve test test-cluster test-redis7 test-redis62 test-redis82 test-containers test-acl audit lock lint format docs shots transcripts bench bench-page bench-quick bench-blocking bench-bounds bench-growth bench-growth-page bench-policies bench-produce bench-scale bench-spark bench-survival costs simulate faults faults-page model model-full mutants soak soak-archive soak-memory soak-nemesis soak-kill-points soak-hygiene build clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## Show streamqd at work on 10,000 real log lines, then end
	@$(BIN)/python -m streamqd.examples.demo --dir $(DEMO_DIR)

serve: $(RUN_STAMP) ## The same, and stay until Ctrl-C
	@$(BIN)/python -m streamqd.examples.demo --dir $(DEMO_DIR) --serve

test: $(DEV_STAMP) ## Run the whole suite on the bundled Valkey (PYTEST_ARGS="-k lease" selects)
	@# Spark's tests alone: they share one session, which keeps both cores busy. 5: none was selected.
	status=0; \
	$(BIN)/pytest $(PARALLEL) --ignore=tests/spark --ignore=$(CLUSTER) $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/pytest tests/spark $(PYTEST_ARGS) || [ $$? -eq 5 ] || status=1; \
	exit $$status

test-cluster: $(DEV_STAMP) ## Run Spark with executors of their own, and the full loop to a daemon
	$(BIN)/pytest $(CLUSTER) $(PYTEST_ARGS)

test-redis7: $(DEV_STAMP) ## Run what needs a server on the redis-server found in PATH
	$(BIN)/pytest $(PARALLEL) --server redis7 $(PARTS) $(ON_SERVER) $(PYTEST_ARGS)

test-redis62: $(DEV_STAMP) $(REDIS62) ## Run what needs a server on Redis 6.2
	$(BIN)/pytest $(PARALLEL) --server redis62 $(PARTS) $(ON_SERVER) $(PYTEST_ARGS)

test-redis82: $(DEV_STAMP) $(REDIS82) ## Run what needs a server on Redis 8.2
	$(BIN)/pytest $(PARALLEL) --server redis82 $(PARTS) $(ON_SERVER) $(PYTEST_ARGS)

test-containers: $(DEV_STAMP) ## Run the scripts' contracts on a server in a container (a Docker engine)
	PYTHON=$(BIN)/python tests/support/make_image.sh streamqd-test-server
	STREAMQ_TEST_IMAGE=streamqd-test-server $(BIN)/pytest --server testcontainers tests/contract $(PYTEST_ARGS)

test-acl: $(DEV_STAMP) ## Run what needs a server as the restricted users of etc/acl (SERVER=redis7)
	$(BIN)/pytest $(PARALLEL) --acl --server $(or $(SERVER),valkey) tests/integration \
		$(filter-out $(SERVERLESS),$(wildcard tests/acceptance/test_*.py)) $(PYTEST_ARGS)

audit: $(DEV_STAMP) ## Ask for known flaws of the dependencies; writes var/audit/sbom.json
	$(BIN)/python tests/support/audit.py var/audit

lock: $(DEV_STAMP) ## Write etc/requirements.lock anew: the newest allowed dependencies, by hash
	$(BIN)/python -m pip install --quiet pip-tools
	printf '# %s\n' 'What the daemon needs, by hash: pip install --require-hashes -r etc/requirements.lock' \
		'Written by make lock.' > etc/requirements.lock
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --no-header --no-annotate --strip-extras \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --output-file - pyproject.toml \
		>> etc/requirements.lock

lint: $(DEV_STAMP) ## Check style, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## Format the code and mend what can be mended
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DOCS_STAMP) ## Write the generated pages anew and build the site into var/site
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going --fresh-env docs var/site
	@echo "the site: file://$(CURDIR)/var/site/index.html"

shots: $(DOCS_STAMP) ## Make the pictures of docs/images from a live run (tmux, Chromium, Java)
	$(BIN)/python -m tests.pages.shots

transcripts: $(DEV_STAMP) ## Make docs/internals/transcripts from live runs (root, debootstrap, systemd-nspawn)
	$(BIN)/python -m tests.support.top_transcript
	$(BIN)/python -m tests.support.systemd_transcript

bench: $(DEV_STAMP) ## Measure streamqd beside its peers, 8 minutes a round (BENCH_ARGS="--only celery --rounds 1")
	$(BIN)/python -m tests.benchmarks.peers $(BENCH_ARGS)

bench-survival: $(DEV_STAMP) ## Kill a worker of streamqd and of each peer, 20 minutes (BENCH_ARGS="--only arq")
	$(BIN)/python -m tests.benchmarks.peers.survival $(BENCH_ARGS)

bench-page: $(DEV_STAMP) ## Write docs/explanation/benchmarks.md and its plots from the results
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m tests.benchmarks.peers.page

bench-quick: $(DEV_STAMP) ## Measure the hot path beside the bare loop, takeover and hand-over
	$(BIN)/python -m tests.benchmarks.quick $(BENCH_ARGS)

bench-bounds: $(DEV_STAMP) ## Measure takeovers, hand-overs and what a dead server loses; writes the page
	$(BIN)/python -m tests.benchmarks.bounds $(BENCH_ARGS)

bench-spark: $(DEV_STAMP) ## Measure Spark beside one tuned process (BENCH_ARGS="--rows 5000000")
	$(BIN)/python -m tests.benchmarks.spark $(BENCH_ARGS)

bench-scale: $(DEV_STAMP) ## Measure hundreds of units on one host (BENCH_ARGS="--shapes 256x1 16x16")
	$(BIN)/python -m tests.benchmarks.scale $(BENCH_ARGS)

bench-growth: $(DEV_STAMP) ## Measure how the cost grows with units and with what lies around, 10 minutes
	$(BIN)/python -m tests.benchmarks.growth $(BENCH_ARGS)

bench-growth-page: $(DEV_STAMP) ## Write docs/internals/growth.md and its plots from the results
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m tests.benchmarks.growth --page $(BENCH_ARGS)

bench-blocking: $(DEV_STAMP) ## Measure how long each script keeps the server busy (BENCH_ARGS="--rounds 3")
	$(BIN)/python -m tests.benchmarks.blocking $(BENCH_ARGS)

bench-produce: $(DEV_STAMP) ## Measure the producers beside bare XADDs (BENCH_ARGS="--messages 200000")
	$(BIN)/python -m tests.benchmarks.produce $(BENCH_ARGS)

bench-policies: $(DEV_STAMP) ## Measure what keeping the order of keys costs when messages fail
	$(BIN)/python -m tests.benchmarks.policies $(BENCH_ARGS)

costs: $(DEV_STAMP) ## Count commands and round trips; writes docs/internals/costs.md
	COSTS=1 $(BIN)/pytest $(wildcard tests/integration/test_costs*.py)

simulate: $(DEV_STAMP) ## Simulate 500 instances and 10,000 partitions; writes the page (two hours)
	$(BIN)/python -m tests.simulation $(SIMULATE_ARGS)

faults: $(DEV_STAMP) $(REDIS62) ## Run the fault battery on three servers; writes its page (FAULTS_ARGS="-k sentinel redis7")
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

faults-page: $(DEV_STAMP) ## Write the page of the fault battery anew, from the outcomes of the last run
	$(BIN)/python -m tests.faults --page

model: $(DEV_STAMP) ## Check the protocol with Spin, and that every rule is needed
	$(BIN)/python -m tests.protocol

model-full: $(DEV_STAMP) ## The same in larger scopes; writes docs/internals/protocol-model.md
	$(BIN)/python -m tests.protocol --full --write

mutants: $(DEV_STAMP) ## Break the code on purpose and see the tests turn red
	$(BIN)/python -m tests.mutants

soak: soak-archive soak-memory soak-nemesis soak-kill-points soak-hygiene ## Run all long tests; their results are in docs/internals/soak/

soak-archive: $(DEV_STAMP) ## Kill the archive and its executors 20 times (KILLS=n SEED=n)
	KILLS=$${KILLS:-20} SEED=$${SEED:-} RESULT=$${RESULT:-docs/internals/soak/archive-kills.json} \
		$(BIN)/pytest -s tests/soak/test_archive_kills.py $(PYTEST_ARGS)

soak-memory: $(DEV_STAMP) ## See that 10 million messages leave memory as it was (MESSAGES=n)
	MESSAGES=$${MESSAGES:-10000000} RESULT=$${RESULT:-docs/internals/soak/memory.json} \
		$(BIN)/pytest tests/soak/test_memory.py $(PYTEST_ARGS)

soak-nemesis: $(DEV_STAMP) ## Strike a fleet at random; nothing may be lost (MINUTES=n SEED=n)
	MINUTES=$${MINUTES:-10} SEED=$${SEED:-} RESULT=$${RESULT:-docs/internals/soak/nemesis.json} \
		$(BIN)/pytest -s tests/soak/test_nemesis.py $(PYTEST_ARGS)

soak-kill-points: $(DEV_STAMP) ## Kill and pause at every crash point, 3 times over (ROUNDS=n)
	ROUNDS=$${ROUNDS:-3} RESULT=$${RESULT:-docs/internals/soak/kill-points.json} \
		$(BIN)/pytest -s tests/soak/test_kill_points.py $(PYTEST_ARGS)

soak-hygiene: $(DEV_STAMP) ## Replace 10,000 workers under a storm of signals (COUNT=n SEED=n)
	@$(BIN)/python -m pip install --quiet --editable '.[soak]' || echo "gRPC is left out" >&2
	COUNT=$${COUNT:-10000} SEED=$${SEED:-1} RESULT=$${RESULT:-docs/internals/soak/hygiene.json} \
		$(BIN)/pytest -s tests/soak/test_hygiene.py $(PYTEST_ARGS)

build: $(DEV_STAMP) ## Build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean: ## Remove everything that is not in the repository, the virtual environment too
	rm -rf $(VENV) .cache var dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "streamqd needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo missing). Name another:" \
			"make PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' does not work here. On Debian: apt-get install python3-venv" >&2; \
		exit 1; }

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[embedded]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): pyproject.toml $(DEV_STAMP)
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

.cache/servers/%/redis-server: | $(DEV_STAMP)
	@$(BIN)/python tests/support/fetch_server.py $*
