# Every target installs what it needs into this checkout first; see scripts/bootstrap.
SHELL := /bin/sh
BIN := .venv/bin
INSTALLED := .venv/.paceline
PYTEST := $(BIN)/pytest
# Tests side by side: one lane per core, and two for tests that mostly wait, as on Kubernetes.
LANES ?= $(shell expr $$(nproc) + 2)

# Of a release. The worker's is gigabytes; with none, `make release IMAGES=`.
IMAGES ?= operator worker

.DEFAULT_GOAL := help
.PHONY: docs recording help install demo monitor test test-all durations test-cluster soak soak-cluster bench-smoke bench-operator bench-memory gpu-check rehearse large test-fast check format generate verify version release clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED) ## everything into .tools and .venv of this checkout (TORCH=cpu TORCH_SHA256=...: without CUDA)

$(INSTALLED): pyproject.toml uv.lock scripts/bootstrap
	@scripts/bootstrap
	@touch $@

demo: install ## train on handwritten digits: one worker slow, one killed, one joins
	@$(BIN)/python examples/digits/check.py

monitor: install ## Prometheus, and Grafana if there is one, over a local job that runs; JOB=NAME
	@$(BIN)/python -m testing.cluster prometheus
	@JOB="$(JOB)" $(BIN)/python -m testing.cluster.monitor

test: install ## all checks, and a test for each promise; what the README and CI run
	@$(BIN)/python -m scripts.run_tests --lanes $(LANES)

test-all: install ## all checks and every test there is, the exhaustive ones as well
	@$(BIN)/python -m scripts.run_tests --all --lanes $(LANES)

durations: install ## like test-all; rewrites tests/durations.json, by which tests are ordered
	@$(BIN)/python -m scripts.run_tests --all --durations --lanes $(LANES)

test-cluster: cluster-programs ## of these the ones on a real Kubernetes
	@$(PYTEST) tests/cluster tests/operator tests/nodes

soak-cluster: cluster-programs ## HISTORIES=200 random histories of jobs on a real API server
	@PACELINE_HISTORIES=$${HISTORIES:-200} \
		$(PYTEST) tests/operator/real/test_histories_real.py

bench-operator: cluster-programs ## requests, seconds, CPU of jobs; SIZES="1x8 1x64 100x8"
	@$(BIN)/python -m benchmarks operator --sizes $${SIZES:-1x8 1x64 100x8}

bench-memory: install ## MiB of the operator while many jobs train; JOBS="100 300 1000"
	@$(BIN)/python -m benchmarks operator-memory --jobs $${JOBS:-100 300 1000}

rehearse: install ## P=1024 ranks on this machine, all real but the training; figures and limits
	@$(BIN)/python -m benchmarks rehearsal --ranks $(or $(P),1024)

large: install ## RANKS=40 torch ranks on this machine: digits, one killed, one replica joins
	@$(BIN)/python -m benchmarks large --ranks $(or $(RANKS),40)

soak: install ## the full fault matrix and on: SOAK_SECONDS=3600 for so long, SOAK_SEED=0 to begin with
	@SOAK_SECONDS=$(or $(SOAK_SECONDS),3600) SOAK_SEED=$(or $(SOAK_SEED),0) \
		$(PYTEST) tests/local/test_histories.py -k soak -s

gpu-check: install ## checks and tables on the GPUs of this machine; without one it ends with 3
	@$(BIN)/python -m benchmarks.gpu

bench-smoke: install ## the benchmarks at their smallest sizes, which only shows that they work
	@PACELINE_BENCHMARKS=1 $(PYTEST) tests/benchmarks

# Each lane rewrites the asserts of 300 files, unless it may keep what the last run has rewritten.
test-fast: install ## the tests that start no processes, with a twentieth of the examples of each property
	@env -u PYTHONDONTWRITEBYTECODE PACELINE_TEST_EXAMPLES_PERCENT=5 $(PYTEST) -m "not processes and not cluster_programs and not long and not exhaustive" \
		--numprocesses $(shell nproc)

check: install ## read-only: format, lint, types, imports, generated files, citations
	@$(BIN)/python scripts/check.py

format: install ## put the code into form
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

generate: install ## rewrite the files that are derived from the code
	@$(BIN)/python scripts/check.py --generate

docs: install ## the documentation as a site, into site/, strictly; VERSIONS=FOLDER: also beside other versions
	@$(BIN)/python -m scripts.site $(if $(VERSIONS),--versions "$(VERSIONS)") && echo "site/index.html"

recording: install ## docs/pictures/run.svg and docs/report.png anew, from a run of the first example
	@$(BIN)/python -m scripts.recording

verify: generate test ## like test, and the generated files are committed
	@git diff --exit-code --stat -- crds/manifests docs README.md

version: install ## which it is; VERSION=1.2.3 changes it wherever it stands
	@$(BIN)/python -m scripts.version $(VERSION)

release: install ## all of a release into dist; KEY=key.pem signs; BASE=FILE; IMAGES="operator worker"
	@$(BIN)/python -m scripts.release $(if $(KEY),--key "$(KEY)") $(if $(BASE),--base "$(BASE)") \
		--images $(IMAGES)

clean: ## remove what was installed, caches and the folders of runs
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs dist site .site .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

include testing/cluster/cluster.mk
