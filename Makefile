# make demo            set up, then corpus, tokenizer, shards, pretraining, resume, report and export
# make demo-recall     set up, then train a small model that finds needles, over ranks; evaluation and plots
# make demo-chat       set up, then tune a base model over ranks: chat template, adapters, preferences; compared
# make demo-translate  set up, then train an encoder-decoder to translate, over ranks; BLEU on held-out pages
# make test            set up, then run the tests
# make test-core       set up, then run one test per promise in the README, in about a minute
# make test TARGET=torch2.11   with Python 3.12 and PyTorch 2.11, in a separate environment (docs/versions.md)
# make setup           only the virtual environment; set DS_ACCELERATOR=cuda to prepare for GPUs on a machine without one
# make bench           ratios against stated bounds and peers, all in one run; SAVE=1 saves the results for docs/
# make faults          slow tests: fault suite, full matrices, 20 steps of parity, recall, full corpora; PART=2/3: the second third
# make dist            wheel and source archive in dist/ (docs/release.md)
# make site            documentation site in site/
# make lint            the linters that CI runs after the tests

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
$(error TARGET=$(TARGET) is unknown. Try torch2.13 or torch2.11)
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
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing); longctx needs Python 3.11 or newer. Try: make PYTHON=python3.12 setup"; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then echo "==> torch is installed"; \
	elif test "$(DS_ACCELERATOR)" = cuda; then echo "==> torch for NVIDIA GPUs" && $(BIN)/pip install "$(TORCH)"; \
	elif $(BIN)/pip install --no-index --no-deps "$(TORCH)" >/dev/null 2>&1; then echo "==> torch from local wheels" && $(BIN)/pip install "$(TORCH)"; \
	else echo "==> torch for CPUs, about 200 MB" && $(BIN)/pip install "$(TORCH)" --index-url "$(TORCH_CPU_INDEX)"; fi
	@# The distribution was once called longctx: without this, both would own .venv/bin/longctx.
	@if $(BIN)/pip show longctx 2>/dev/null | grep -qx "Editable project location: $(CURDIR)"; then $(BIN)/pip uninstall -qy longctx; fi
	@echo "==> longctx, its dependencies and test tools"
	@# Pin the tested versions if this pair of Python and torch was tested; otherwise pin nothing.
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
	@# Keep the order from tests/conftest.py: xdist would start with the files that have most tests, not the longest. Three
	@# workers on two cores, because many tests wait for ranks to fail.
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
