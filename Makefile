# make demo    set up, then the whole road: corpus, tokenizer, shards, pretraining, resume, report, export
# make demo-recall   set up, then a small model that finds needles: training over ranks, evaluation, pictures
# make demo-chat     set up, then a base model learns to answer in a chat template, over ranks; before and after
# make demo-translate   set up, then an encoder and a decoder learn to translate, over ranks; BLEU on pages they have not seen
# make test    set up, then the tests
# make test-core   set up, then one case of each promise of the README, in a minute or so
# make test TARGET=torch2.11   the same under Python 3.12 and PyTorch 2.11, in an environment of its own (docs/versions.md)
# make setup   the virtual environment alone; seconds when there is nothing to do; DS_ACCELERATOR=cuda where no GPU is at hand yet
# make bench   ratios against named limits and peers, all in one run; SAVE=1 keeps the figures for docs/
# make faults  the slow proofs: the fault suite, whole matrices, 20 steps of parity, recall, whole corpora; PART=2/3 runs the second third
# make dist    wheel and source archive in dist/ (docs/release.md)
# make site    the documentation as a site, in site/
# make lint    what CI runs after the tests

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
TARGET ?= torch2.13
ifeq ($(TARGET),torch2.13)
PYTHON ?= python3
VENV := .venv
TORCH := torch==2.13.0
else ifeq ($(TARGET),torch2.11)
PYTHON ?= python3.12
VENV := .venv-torch2.11
TORCH := torch==2.11.0
else
$(error TARGET=$(TARGET) is not one. Try torch2.13 or torch2.11)
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
RUN ?= runs/quickstart
RECALL_RUN ?= runs/recall
CHAT_RUN ?= runs/chat
TRANSLATE_RUN ?= runs/translate
WORKERS ?= 3
PART ?= 1/1

ifndef DS_ACCELERATOR
DS_ACCELERATOR := $(shell if nvidia-smi >/dev/null 2>&1; then echo cuda; else echo cpu; fi)
endif
export DS_ACCELERATOR
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

.PHONY: setup demo demo-recall demo-chat demo-translate test test-core bench faults dist site lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there); longctx needs Python 3.11 or newer. Try: make PYTHON=python3.12 setup"; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then echo "==> torch is installed"; \
	elif test "$(DS_ACCELERATOR)" = cuda; then echo "==> torch for NVIDIA GPUs" && $(BIN)/pip install "$(TORCH)"; \
	elif $(BIN)/pip install --no-index --no-deps "$(TORCH)" >/dev/null 2>&1; then echo "==> torch from local wheels" && $(BIN)/pip install "$(TORCH)"; \
	else echo "==> torch for CPUs, about 200 MB" && $(BIN)/pip install "$(TORCH)" --index-url "$(TORCH_CPU_INDEX)"; fi
	@# The distribution had another name once: without this both would own .venv/bin/longctx.
	@if $(BIN)/pip show longctx 2>/dev/null | grep -qx "Editable project location: $(CURDIR)"; then $(BIN)/pip uninstall -qy longctx; fi
	@echo "==> longctx, its dependencies and the tools of its tests"
	@# The versions that the tests ran with, if Python and torch are a pair that was tested; of other pairs nothing is pinned.
	@pins=$$($(BIN)/python -c 'import sys; from importlib.metadata import version; print("constraints/python{}.{}-torch{}.txt".format(*sys.version_info[:2], ".".join(version("torch").split(".")[:2])))'); \
	if test -f "$$pins"; then echo "==> versions of $$pins" && $(BIN)/pip install -e '.[dev,bleu,po]' -c "$$pins"; \
	else $(BIN)/pip install -e '.[dev,bleu,po]'; fi
	@$(BIN)/python -m longctx_train
	@touch $@

demo: setup
	@bash launcher/demos/quickstart.sh $(RUN)

demo-recall: setup
	@bash launcher/demos/recall.sh $(RECALL_RUN)

demo-chat: setup
	@bash launcher/demos/chat.sh $(CHAT_RUN)

demo-translate: setup
	@bash launcher/demos/translate.sh $(TRANSLATE_RUN)

test: setup
	@# In the order of tests/conftest.py: by itself xdist begins with the files of most tests, not the longest. Three workers
	@# on two cores: many tests wait for ranks that are to fail.
	@DS_ACCELERATOR=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not multigpu"

test-core: setup
	@DS_ACCELERATOR=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist load --core -m "not slow and not gpu and not multigpu"

faults: setup
	@DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m "slow and not gpu and not multigpu" --timeout 1800 --part $(PART)

bench: setup
	@$(BIN)/python -m benchmarks $(if $(SAVE),--save)

dist: setup
	@rm -rf dist && $(BIN)/python -m build

site: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: setup
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/pyright && $(BIN)/lint-imports && $(BIN)/codespell && $(BIN)/python -m tests.lint.style && $(BIN)/python -m tests.lint.prose
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

clean:
	rm -rf $(VENV) runs build dist site *.egg-info
