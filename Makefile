# Everything is installed into .venv and nothing outside it is touched, but for the browser of the tests (see below,
# `browser`). Each .venv/.stamp-* marks a finished
# step, so that a second run skips it; a change of constraints.txt or pyproject.toml makes it run again.

PYTHON ?= $(firstword $(shell command -v python3 python))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet -c constraints.txt
INPUTS := constraints.txt pyproject.toml

# Their metadata names torch; see `zoo` in pyproject.toml for why they are installed with --no-deps.
ZOO_MODELS := torchvision timm transformers torch-pruning
# What these four need besides torch and numpy.
ZOO_LIGHT := filelock huggingface_hub packaging pillow pyyaml regex safetensors tokenizers tqdm typer
# What the adapters in tgfx/lightning.py and tgfx/hf.py are for. They name torch too (lightning also its twin
# pytorch-lightning, which is the same code again).
TRAINERS := lightning torchmetrics accelerate
TRAINERS_LIGHT := fsspec lightning-utilities packaging psutil pyyaml tqdm typing-extensions

# What exported models are tried in. pnnx and executorch ask for torch or for packages that do; executorch runs
# (with XNNPACK) on the few that follow it.
RUNTIMES := openvino MNN ncnn pnnx executorch torchao ruamel.yaml tabulate

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test zoo bench repro-quick runtimes lint typecheck browser clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(VENV)/.stamp-core ## train, gate, shrink and export a small net, print before and after
	$(BIN)/python -m examples.demo.demo

test: lint $(VENV)/.stamp-zoo $(VENV)/.stamp-trainers browser ## lint, then all tests
	$(BIN)/python -m pytest -q -n 2

zoo: $(VENV)/.stamp-zoo ## prove the cut exact on every zoo model, write examples/zoo/COVERAGE.md
	$(BIN)/python -m examples.zoo.run

runtimes: $(VENV)/.stamp-runtimes ## try exported models in OpenVINO, MNN, ncnn and ExecuTorch too
	$(BIN)/python -m pytest -q -rs tests/runtimes

bench: $(VENV)/.stamp-zoo browser ## measure transform time, training overhead and growth
	$(BIN)/python -m examples.benchmarks.run

# The paper's experiments, each for less than a minute on data that it makes itself.
EXPERIMENTS := sine.run resnet56.run resnet56.curve resnet56.peer gradient_shapes.run vgg16.run style_transfer.run \
	flownet.run translation.run
repro-quick: $(VENV)/.stamp-zoo ## run the paper's experiments in their quick modes
	@for name in $(EXPERIMENTS); do \
		echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python -m examples.$$name --quick || exit 1; \
	done

lint: $(VENV)/.stamp-test ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory typecheck

typecheck: $(VENV)/.stamp-test ## mypy on the package as it is installed
	@rm -rf $(VENV)/types && mkdir -p $(VENV)/types/tgfx
	@ln -s $(addprefix ../../../,$(wildcard tgfx/*)) ../../../passes $(VENV)/types/tgfx/
	$(BIN)/mypy -p tgfx

# The page is tested in a real Chromium, which comes from the system's packages: installed where make runs as root on a
# system with apt (BROWSER=no keeps it from that). Elsewhere this says what is missing, and pytest lists what it skips.
BROWSER ?= yes
browser:
	@command -v chromedriver >/dev/null && command -v chromium >/dev/null && exit 0; \
	if [ "$(BROWSER)" = yes ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium and chromium-driver for the tests of the page"; \
		{ apt-get install -y -qq chromium chromium-driver || \
			{ apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }; } >/dev/null 2>&1; \
	fi; \
	command -v chromedriver >/dev/null && command -v chromium >/dev/null || \
		echo "NO BROWSER: the page's tests will be skipped; apt-get install chromium chromium-driver brings it"

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tgfx needs Python 3.11 or later; make PYTHON=/path/to/python chooses one"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tgfx needs Python 3.11 or later, $(PYTHON) is older; make PYTHON=... chooses another"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, at the version constraints.txt pins: later steps find it there and keep it.
# Another version could be a CUDA build of several gigabytes.
$(VENV)/.stamp-core: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) $(shell grep '^torch==' constraints.txt)
	$(PIP_INSTALL) -e '.[demo,onnx]'
	@touch $@

$(VENV)/.stamp-test: $(INPUTS) $(VENV)/.stamp-core
	$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@

$(VENV)/.stamp-zoo: $(INPUTS) $(VENV)/.stamp-test
	$(PIP_INSTALL) --no-deps $(ZOO_MODELS)
	$(PIP_INSTALL) $(ZOO_LIGHT)
	@touch $@

$(VENV)/.stamp-trainers: $(INPUTS) $(VENV)/.stamp-zoo
	$(PIP_INSTALL) --no-deps $(TRAINERS)
	$(PIP_INSTALL) $(TRAINERS_LIGHT)
	@touch $@

$(VENV)/.stamp-runtimes: $(INPUTS) $(VENV)/.stamp-test
	$(PIP_INSTALL) --no-deps $(RUNTIMES)
	@touch $@
