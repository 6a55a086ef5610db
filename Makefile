# EpochKV. `make help` lists the targets; `make demo` and `make test` set everything up by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export CLUSTER ?= local

DEV := .build/venv/bin/python
ENGINE := .build/venv-engine/bin/python
SETUP := hack/setup.sh
TESTS := $(DEV) -m hack.run_tests
IPV6_TESTS := $(addprefix tests/e2e/test_,journey.py helm_test.py joining.py)
KIND_TESTS := $(addprefix tests/e2e/test_,journey.py helm_test.py joining.py policies.py nodes.py kind.py)
TRAINERS := $(basename $(notdir $(wildcard hack/requirements/trainers/*.in)))
# kind needs Debian's packages where it has a Docker daemon of its own; elsewhere they would replace those of the machine's daemon.
SYSTEM = $(if $(filter kind,$(CLUSTER)),$(if $(filter start,$(EPOCHKV_DOCKER)),$(shell docker version >/dev/null 2>&1 || echo system)),system)
# For what runs on a GPU machine from a plain checkout: any Python >= 3.11 with torch; nothing is installed.
TORCH := PYTHONPATH=$(CURDIR)/connector $(or $(PYTHON),python3)

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: ## Python environment for the operator, the fence and the tools
	@$(SETUP) dev

setup-engine: ## Environment of `setup`, plus vLLM on CPU and the connector (6 GB)
	@$(SETUP) dev engine dynamo

setup-trainers: setup ## Environments of trainers, each beside the vLLM on CPU that it takes (6 GB each; wheels are shared)
	@$(SETUP) $(TRAINERS)

setup-cluster: ## What tests of the API server need: packages, Go-built Kubernetes, environments
	@$(SETUP) $(SYSTEM) dev
	@$(if $(filter kind,$(CLUSTER)),true,$(DEV) -m hack.cluster build)
	@$(SETUP) engine dynamo

setup-pods: ## Everything that make demo needs, side by side, and the images of pods
	@$(SETUP) $(SYSTEM) dev
	@$(DEV) -m hack.demo prepare

demo: ## The main job: cluster, chart, pool, engines, prompts, new weights, resetEpoch, proof (CLUSTER=local|local-ipv6|kind, EPOCHKV_DOCKER=start)
	@$(SETUP) $(SYSTEM) dev
	@$(DEV) -m hack.demo run

demo-stock: setup-engine ## No cluster: vLLM's own Mooncake connector reuses stale KV; ours does not, nor does vLLM's with our fence
	@$(ENGINE) -m hack.demo stock

demo-cold: setup-engine ## No cluster: the first load of fresh engines from the store, on a machine kept busy (RUNS=10 LOAD=4)
	@$(ENGINE) -m hack.demo cold $(if $(RUNS),--runs $(RUNS)) $(if $(LOAD),--load $(LOAD)) $(if $(SEED),--seed $(SEED))

down: ## Remove everything that demo made
	@if [ -x $(DEV) ]; then $(DEV) -m hack.demo down; else echo "nothing to remove"; fi

setup-checks: setup ## What tests check alerts, workflows and the page on GitOps with (built once, minutes)
	@$(DEV) -m hack.cluster build prometheus actionlint gitops

setup-groups: setup ## The controller of LeaderWorkerSets, for slow tests (built once, minutes)
	@$(DEV) -m hack.cluster build lws

test: setup-pods setup-cluster setup-checks lint ## Set up everything, pass every test but the slow ones: at most 25 minutes on two cores, 40 from nothing
	@$(TESTS)

test-all: setup-pods setup-cluster setup-checks setup-groups setup-trainers lint ## Every test: whole matrices, each kill, trainers (77 minutes on two cores; environments of 20 GB)
	@$(TESTS) --all
	@$(MAKE) --no-print-directory test-transfers
	@$(MAKE) --no-print-directory test-ipv6
	@$(MAKE) --no-print-directory test-kind

test-fast: setup ## Pure layer for the inner loop: operator and tools (under a minute, no vLLM)
	@$(TESTS) fast

test-unit: setup-engine ## Units, the fence over real sockets, its model (no root, minutes)
	@$(TESTS) unit

test-scheduler: setup-engine ## Real vLLM scheduler with the connector
	@$(TESTS) scheduler

test-store: setup-engine ## Real Mooncake master and store
	@$(TESTS) store

test-engine: setup-engine ## Real vLLM engines on CPU
	@$(TESTS) engine

test-cuda: ## Copies on this machine's GPU; torch only, no setup, minutes (PYTHON=python SOAK_SECONDS=60)
	@$(TORCH) -m tests.cuda

test-families: setup-engine ## Every family of models on real engines (`make test` runs a slice)
	@$(ENGINE) -m pytest -v tests/engine/test_families.py

test-transfers: setup-engine ## Real NIXL from a prefill to a decode engine (keeps a core of each engine busy: four cores are better)
	@$(SETUP) nixl
	@PYTHONPATH=.build/nixl $(ENGINE) -m pytest -v tests/engine/test_transfers.py

test-trainers: setup-trainers ## Real trainers and frameworks on CPU with two rollouts, our hub and Mooncake (no part of `make test`)
	@$(TESTS) trainers

test-cluster: setup-cluster setup-checks ## Real API server; operator, chart, RBAC
	@$(TESTS) cluster

test-kills: setup-cluster ## The operator killed after each of its writes, in every flow (`make test` runs a slice)
	@$(DEV) -m pytest -s tests/cluster/test_operator_kills.py

test-e2e: setup-pods setup-cluster ## The whole journey in pods
	@$(TESTS) e2e

test-ipv6: export CLUSTER = local-ipv6
test-ipv6: setup-pods ## Pods on a local cluster that has no IPv4
	@$(DEV) -m pytest -v $(IPV6_TESTS)

test-kind: export CLUSTER = kind
test-kind: export EPOCHKV_DOCKER ?= start
test-kind: ## Pods on kind: NetworkPolicies enforced, two nodes, faults of the provider (a Docker daemon is started if none runs)
	@$(MAKE) --no-print-directory setup-pods
	@$(DEV) -m pytest -v $(KIND_TESTS)

simulate: setup ## Fence: random schedules with every fault, any number (SCHEDULES=20000 SEED=random)
	@$(DEV) -m hack.simulate run --schedules $(or $(SCHEDULES),20000) $(if $(SEED),--seed $(SEED))

simulate-mutants: setup ## Fence: each rule of the protocol taken away must be noticed
	@$(DEV) -m hack.simulate mutants

lint: setup-engine ## ruff, mypy --strict, import walls and circles, generated files up to date
	@$(DEV) -m ruff check .
	@$(DEV) -m ruff format --check .
	@$(ENGINE) -m mypy
	@.build/venv-engine/bin/lint-imports
	@$(DEV) -m hack.api_reference --check
	@$(DEV) -m hack.config_reference --check
	@$(DEV) -m hack.model_support --check
	@$(DEV) -m hack.sync_chart --check
	@$(DEV) -m hack.observe --check
	@$(DEV) -m hack.census

census: setup ## Lines by package; fails on import circles
	@$(DEV) -m hack.census

generate: setup ## Write the references of API, configuration, models and metrics, and the CRDs and rights of the chart
	@$(DEV) -m hack.api_reference
	@$(DEV) -m hack.config_reference
	@$(DEV) -m hack.model_support
	@$(DEV) -m hack.sync_chart
	@$(DEV) -m hack.observe

# The locked requirements where `make lock` has written them, else the ranges that they are compiled from.
DOCS := .build/venv-docs
$(DOCS)/.made: $(firstword $(wildcard hack/requirements/docs.txt) hack/requirements/docs.in)
	@$(or $(PYTHON),python3) -m venv --clear $(DOCS)
	@$(DOCS)/bin/pip install -q --disable-pip-version-check -r $<
	@touch $@

.PHONY: docs
docs: $(DOCS)/.made ## Build the documentation site into .build/site; a broken link or a page outside the nav fails
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "open .build/site/index.html"

sbom: ## CycloneDX lists of the Python packages that the images of operator, store and connector install, in .build/sbom
	@$(SETUP) sbom
	@for image in operator store connector; do \
	  .build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --spec-version 1.6 --output-reproducible \
	    --output-file .build/sbom/$$image.cdx.json .build/sbom/env-$$image/bin/python; \
	  echo ".build/sbom/$$image.cdx.json"; \
	done

bench-epoch: setup ## Patch -> published: median and max of 20 bumps; needs the cluster that `make demo` leaves up
	@eval "$$($(DEV) -m hack.cluster env)" && $(DEV) -m bench.bump_to_published --namespace epochkv-demo

bench-fence: setup-cluster ## Fence: bump -> published by size and authority, steady state, faults, scheduler cost (ARGS="bump-16 --bumps 50")
	@$(DEV) -m bench.fence $(ARGS)

bench-operator: setup-cluster ## Operator: cost of a look by size, fleets of 100 to 2,000 engines on a real API server (ARGS="planning fleet-300")
	@$(DEV) -m bench.operator $(ARGS)

bench-connector: setup-engine ## Connector: time to first token, vLLM's own connector, decode, L2, copies, chat trace (ARGS="ttft store")
	@$(ENGINE) -m bench.connector $(ARGS)

bench-start: setup-engine ## Engine start-up with the connector and without
	@$(ENGINE) -m bench.engine_start $(ARGS)

bench-weights: ## What naming KV after weights costs (ARGS="digest sample updates" PYTHON=python: torch and xxhash only, also on a GPU)
	@$(if $(PYTHON),true,$(SETUP) dev engine)
	@PYTHONPATH=$(CURDIR)/connector $(or $(PYTHON),$(ENGINE)) -m bench.weights $(ARGS)

bench-staging: ## Staging copies against a plain copy of the same machine; torch only, no setup (PYTHON=python ARGS="--json FILE")
	@$(TORCH) -m bench.staging $(ARGS)

soak: setup-engine ## Three engines under random faults, resets and weight changes (MINUTES=20 SEED=random MODEL=attention|hybrid)
	@$(ENGINE) -m hack.soak --minutes $(or $(MINUTES),20) --model $(or $(MODEL),attention) $(if $(SEED),--seed $(SEED))

chaos: setup-cluster ## Operator under API faults, kills and random edits, then compared with a fresh install (MINUTES=15 SEED=random)
	@$(DEV) -m hack.chaos --minutes $(or $(MINUTES),15) $(if $(SEED),--seed $(SEED))

compat: setup-engine ## Scheduler, unit and engine layers on every vLLM version that is accepted (VERSIONS="0.30 0.31")
	@$(DEV) -m hack.compat run $(VERSIONS)

fuzz: setup ## Fuzz every decoder and receive path (MINUTES=10)
	@$(DEV) -m tests.security.fuzz --minutes $(or $(MINUTES),10)

lock: ## Compile the pinned environments anew
	@hack/requirements/lock.sh --upgrade

clean: ## Forget the environments of this checkout (make down first; caches in ~/.cache/epochkv, ~/.cache/uv, ~/.cache/go-build and ~/go stay)
	@rm -rf .build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup setup-engine setup-trainers setup-cluster setup-pods setup-checks setup-groups demo demo-stock demo-cold down test test-all test-fast test-unit test-scheduler test-store test-engine test-cuda test-families test-transfers test-trainers test-cluster test-kills test-e2e test-ipv6 test-kind chaos simulate simulate-mutants lint census generate sbom bench-epoch bench-fence bench-operator bench-connector bench-start bench-staging bench-weights soak compat fuzz lock clean
