# Everything a developer runs. `make` alone lists it.
# The Python to build on, and arguments for the command that a target runs:
#   make setup PYTHON3=python3.13        make test ARGS='tests/unit -x'
PYTHON3 ?= python3
ARGS ?=

BIN := .venv/bin
# What was installed, the smaller set first: a server needs neither Spark (0.5 GB) nor the tools of developers.
SERVER := .venv/.server
SPARK := .venv/.spark
DEVELOP := .venv/.develop
SOAK := .venv/.soak
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup serve spark example test acceptance lint format docs manifests constraints bench soak clean \
  dashboard screenshots

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEVELOP) ## Prepare .venv for developing; done again only when pyproject.toml or constraints.txt change.

.venv/bin/pip:
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Queen needs Python 3.11 or newer, and $(PYTHON3) is not: make $(MAKECMDGOALS) PYTHON3=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON3) -m venv .venv || { \
	  rm -rf .venv; \
	  echo "$(PYTHON3) cannot make a virtual environment; the lines above say why." >&2; \
	  echo "On Debian and Ubuntu its venv module is a package of its own: apt install python3-venv" >&2; \
	  exit 1; }
	@# uv downloads side by side and resolves at once: a quarter of pip's time. Without it, pip does the same.
	@$(BIN)/pip install --quiet --constraint constraints.txt uv || true

# uv reads no configuration of pip's, so the registry that pip was told of is handed on.
define install
	@registry=$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null)}; \
	VIRTUAL_ENV=.venv $${registry:+env UV_DEFAULT_INDEX="$$registry"} \
	  $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]' \
	|| $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
endef

$(SERVER): EXTRAS := server,redis,otel
$(SERVER): pyproject.toml constraints.txt | .venv/bin/pip
	$(install)

$(SPARK): EXTRAS := server,redis,otel,spark,tables
$(SPARK): $(SERVER)
	$(install)

$(DEVELOP): EXTRAS := server,redis,otel,spark,tables,dev
$(DEVELOP): pyproject.toml constraints.txt | .venv/bin/pip
	$(install)
	@touch $(SERVER) $(SPARK)

$(SOAK): EXTRAS := server,redis,otel,spark,tables,dev,soak
$(SOAK): $(DEVELOP)
	$(install)

serve: $(SERVER) ## Start the server; variables and ARGS are those of `queen serve`.
	@exec $(BIN)/queen serve $(ARGS)

spark: $(SPARK) ## Install what data pipelines on Spark need; they need Java 17 besides.

example: $(SPARK) ## Run a data pipeline from end to end, with a plot; needs Java 17.
	@exec $(BIN)/queen pipeline example $(ARGS)

# Tests start hundreds of processes: without bytecode on disk, each of them would compile every module again.
test acceptance soak: export PYTHONDONTWRITEBYTECODE :=

# Tests wait more than they compute: six at a time on two cores.
# In a new clone one of them compiles all that they load, and not each of the five.
test: setup ## Run the tests.
	@test -d tests/__pycache__ || $(BIN)/pytest --collect-only --quiet > /dev/null || true
	$(BIN)/pytest --numprocesses 6 --dist loadgroup $(ARGS)

acceptance: setup ## Run the published clients against the server; part of `make test`.
	$(BIN)/pytest tests/acceptance $(ARGS)

lint: setup ## Check style, types and the layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code, and mend what ruff can mend.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Write docs/settings.md from the settings, and the reference in docs/cli.md from the commands.
	$(BIN)/queen settings --markdown > docs/settings.md
	sed -i '/^### queen serve$$/,$$d' docs/cli.md && $(BIN)/queen docs --reference >> docs/cli.md

manifests: setup ## Write deploy/kubernetes from the Helm charts.
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/kubernetes/render.sh

# Needs Node 20 or newer; what it makes is committed, so that nobody needs it to run the server.
dashboard: setup ## Build the dashboard, with the types of the API as they are now.
	$(BIN)/python -m tests.dashboard.openapi > dashboard/openapi.json
	cd dashboard && npm install --ignore-scripts --no-audit --no-save && npm run types && npm run build

screenshots: setup ## Take the pictures of docs/dashboard.md; needs chromium-headless-shell or chromium.
	$(BIN)/python -m tests.dashboard.screenshots $(ARGS)

constraints: setup ## Write the versions installed now to constraints.txt.
	$(BIN)/pip freeze --exclude-editable > constraints.txt
	@touch $(SERVER) $(SPARK) $(DEVELOP)

bench: setup ## Measure throughput and latency; ARGS='--help' explains.
	$(BIN)/python bench/run.py $(ARGS)

SOAK_SECONDS ?= 3600
SOAK_REQUESTS ?= 1000000
SOAK_SEED ?= 1
soak: $(SOAK) ## Long campaigns: faults for an hour (SOAK_SECONDS, SOAK_SEED), a million fuzzed requests, the tests marked soak, every property with 5000 examples, load.
	$(BIN)/python -m tests.campaign --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)
	$(BIN)/python -m tests.campaign.fuzz --requests $(SOAK_REQUESTS) --seed $(SOAK_SEED)
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m "soak or hypothesis" --timeout 3600
	$(BIN)/python bench/run.py --only mixed --repeat 1 --mixed-seconds $(SOAK_SECONDS) $(ARGS)

clean: ## Remove caches and what was built; data and .venv stay.
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
