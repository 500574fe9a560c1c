# kvwatch: every target works as the first command after a clone (Debian 12 or newer, Python 3.11 or newer).
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

.PHONY: help run test check lint test-engines test-engines-more test-chain test-dashboards bench flood soak chaos gpu-check gen install uninstall clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.run: pyproject.toml tools/venv.sh
	@tools/venv.sh $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.run pyproject.toml
	@tools/venv.sh $(VENV) dev
	@touch $@

run: $(VENV)/.run ## the demo: simulated GPUs and server, status page on http://127.0.0.1:9843/
	@exec $(PY) -m kvwatch run --demo $(ARGS)

test: $(VENV)/.dev ## everything that runs in minutes on any machine
	@tools/tools.sh
	@$(MAKE) --no-print-directory lint
	@$(PY) -m pytest $(ARGS)

lint: $(VENV)/.dev ## style, types, layers, generated files
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(PY) -m kvwatch gen --check

test-engines: $(VENV)/.dev ## against really running inference servers on the CPU (installs about 3.5 GB once)
	@tools/engines.sh
	@$(PY) -m pytest checks/engines/test_vllm.py checks/engines/test_vllm_api_servers.py checks/agent $(ARGS)

test-engines-more: $(VENV)/.dev ## llama.cpp, SGLang, transformers serve and Dynamo as well (builds and installs 8 GB once)
	@tools/engines.sh
	@tools/engines-more.sh
	@$(PY) -m pytest checks/engines/test_llamacpp.py checks/engines/test_sglang.py checks/engines/test_transformers_serve.py checks/engines/test_dynamo.py $(ARGS)

test-chain: $(VENV)/.dev ## real Prometheus and Alertmanager, from the demo to a webhook
	@tools/tools.sh
	@$(PY) -m pytest checks/chain $(ARGS)

test-dashboards: $(VENV)/.dev ## every dashboard query on a real Prometheus that has scraped every demo (a minute)
	@tools/tools.sh
	@$(PY) -m pytest checks/dashboards $(ARGS)

bench: $(VENV)/.dev ## side by side with nvitop-exporter on the same fake NVML
	@tools/tools.sh
	@tools/bench.sh $(ARGS)

flood: $(VENV)/.dev ## scrapes beside a thousand idle, dripping and half-greeting clients (a minute)
	@$(PY) -m checks.endurance.flood $(ARGS)

soak: $(VENV)/.dev ## 30 minutes of every story at ten times its speed: nothing may grow
	@$(PY) -m checks.endurance.soak $(ARGS)

chaos: $(VENV)/.dev ## 15 minutes of overlapping faults (ARGS="--seed 2"): nothing may be violated
	@tools/tools.sh
	@$(PY) -m checks.endurance.chaos $(ARGS)

gpu-check: $(VENV)/.run ## one script under four minutes for a machine with an NVIDIA GPU
	@$(PY) -m checks.gpu $(ARGS)

gen: $(VENV)/.dev ## write dashboards, alerts and reference pages
	@$(PY) -m kvwatch gen

install: ## as a systemd service (root): /opt/kvwatch, /etc/kvwatch, kvwatch.service
	@packaging/install.sh install

uninstall: ## take the service away again; configuration and state stay
	@packaging/install.sh uninstall

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
