# Everything starts here. A fresh machine needs Python 3.10 or newer, and make.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PEERS := .venv-peers
TORCH = $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
EXTRAS := .[cpu,tensorboard,dev]
SECONDS ?= 600
PYTEST := -m "not slow and not faults" --durations=15

# The oldest versions that are promised to work. torch: a build of about 3 GB.
OLDEST_VERSIONS := torch==2.8.0 transformers==5.0.0 peft==0.18.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test faults check fuzz test-oldest plan-truth time-truth bench-quick bench-peers

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: $(VENV)/ready  ## make .venv with the tested versions (the others do it when needed)

demo: $(VENV)/ready  ## fine-tune a small real model on two processes, and show it before and after
	@$(VENV)/bin/python examples/demo/demo.py

test: $(VENV)/ready  ## the test suite
	@echo "== tests: the suite but what is marked slow or faults (make faults)"
	@$(VENV)/bin/python -m pytest $(PYTEST)

faults: $(VENV)/ready  ## every fault in every phase, hundreds of kills (what docs/reliability.md says; a quarter of an hour)
	@echo "== faults: kills, stops, damage and full disks in real runs"
	@$(VENV)/bin/python -m pytest -m faults --durations=15

check: $(VENV)/ready  ## form, types, who imports whom, and the rules of the house
	@echo "== ruff: format" && $(VENV)/bin/ruff format --check .
	@echo "== ruff: lint" && $(VENV)/bin/ruff check .
	@echo "== mypy: types (about half a minute the first time)" && $(VENV)/bin/mypy
	@echo "== import-linter: who imports whom" && $(VENV)/bin/lint-imports
	@echo "== house rules" && $(VENV)/bin/python -m pytest -q tests/house

fuzz: $(VENV)/ready  ## spoilt files of every kind against the readers, for SECONDS=600
	@$(VENV)/bin/python tests/fuzz/fuzz_readers.py $(SECONDS)

test-oldest: $(OLDEST)/ready  ## the whole test suite on the oldest versions promised (downloads about 3 GB)
	@echo "== tests on $(OLDEST_VERSIONS)"
	@$(OLDEST)/bin/python -m pytest $(PYTEST)

plan-truth: $(VENV)/ready  ## the planner's bytes against what real steps allocate (two minutes; docs/plan.md)
	@$(VENV)/bin/python -W ignore benchmarks/plan_truth.py $(ARGS)

time-truth: $(VENV)/ready  ## the planner's seconds against those of real updates, here and now (five minutes; docs/plan.md)
	@$(VENV)/bin/python -W ignore benchmarks/time_truth.py $(ARGS)

bench-quick: $(VENV)/ready  ## the speed held against stored ratios: tutorial's loop, matrix products, one process (under 4 minutes)
	@$(VENV)/bin/python -W ignore benchmarks/quick.py $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-peers: $(PEERS)/ready  ## unisono beside its peers: DATA=gsm8k_train.jsonl ARGS="--cells all --minutes 25"
	@test -n "$(DATA)" || { echo "say where GSM8K is: make bench-peers DATA=path/to/gsm8k_train.jsonl"; exit 2; }
	@$(PEERS)/bin/python benchmarks/peers/run.py --data "$(DATA)" $(ARGS)

# torch first and by its exact version alone: whoever has that very build at hand gets it, and not another one.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV): the project and the versions in constraints.txt (about 1 GB, some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.12"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "== 1/2 torch" && $(VENV)/bin/python -m pip install "$$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)"
	@echo "== 2/2 the rest" && $(VENV)/bin/python -m pip install -c constraints.txt -e '$(EXTRAS)'
	@touch $@

$(OLDEST)/ready: pyproject.toml Makefile
	@echo "== setting up $(OLDEST): $(OLDEST_VERSIONS) (about 3 GB, some minutes)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install $(OLDEST_VERSIONS) -e '$(EXTRAS)'
	@touch $@

# Peers that agree with no one on versions have an environment of their own; one that cannot be made leaves its log,
# and the table says why. No picture is trained here, and beside a torch for CPUs PyPI's torchvision does not load.
$(PEERS)/ready: benchmarks/peers/requirements.txt $(wildcard benchmarks/peers/requirements-*.txt) pyproject.toml constraints.txt
	@echo "== setting up $(PEERS): the project and its peers, with the versions of constraints.txt (about 1.3 GB)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "== 1/2 torch" && $(PEERS)/bin/python -m pip install "$(TORCH)"
	@echo "== 2/2 the rest" && $(PEERS)/bin/python -m pip install -c constraints.txt \
	    -r benchmarks/peers/requirements.txt -e '.[cpu]'
	@for name in litgpt factory torchtune; do \
	    echo "== $(PEERS)-$$name (about 1.3 GB)"; rm -rf $(PEERS)-$$name; $(PYTHON) -m venv $(PEERS)-$$name; \
	    { $(PEERS)-$$name/bin/python -m pip install "$(TORCH)" \
	      && $(PEERS)-$$name/bin/python -m pip install "$(TORCH)" -r benchmarks/peers/requirements-$$name.txt \
	      && $(PEERS)-$$name/bin/python -m pip uninstall -y torchvision; } \
	    > $(PEERS)-$$name.log 2>&1 \
	    || { echo "== $$name cannot be installed: see $(PEERS)-$$name.log"; rm -rf $(PEERS)-$$name; }; \
	done
	@touch $@
