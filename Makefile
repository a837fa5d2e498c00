# Every target sets up what it needs in .venv, once, and again only when the lock files or the packaging change.
#   make quickstart              a whole GRPO run on this machine's CPU
#   make test | test-unit | lint
#   make test-slow              a short real run with every preset and option, and rare layouts, beyond what test runs
#   make cuda-check             the CUDA packages and our CUDA code on a machine without a GPU, as far as that goes: installs
#                               10 GB into .venv-cuda the first time (CUDA_PYTHON: a Python 3.12)
#   make gpu-check               what only a CUDA machine can check, with that machine's own packages; writes and prints a
#                                JSON (PART=torch_only: the part that needs no Ray, vLLM or Transformer Engine; image: the
#                                rest; OPTIONS: of benchmarks/gpu_check.py)
#   make gpu-check-dry           the same checks without a GPU, as far as they go: tests the checks
#   make lock | docs             write requirements/*.lock, docs/configuration.md anew (the locks from the package index)
# PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
CUDA_PYTHON ?= python3.12
VENV := .venv
CUDA_VENV := .venv-cuda
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PART := all
OPTIONS :=
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
SHELL_SCRIPTS := $(wildcard launchers/*.sh launchers/*.sbatch requirements/*.sh) .ci/run

# Tests start some hundreds of Python processes, and images often set this: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: quickstart test test-slow test-unit lint cuda-check gpu-check gpu-check-dry lock docs

quickstart: $(VENV)/.runtime
	$(BIN)/python -m megatron_grpo.train +exp=quickstart

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n 3 --durations=30 tests/unit
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --durations=30 tests/parity
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --durations=30 tests/integration

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n 2 tests/unit
	$(BIN)/python -m pytest -m slow tests/parity
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile tests/integration

test-unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 tests/unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/hadolint docker/Dockerfile.*

cuda-check: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/python -m tests.cuda

gpu-check:
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		echo "gpu-check: this machine has no CUDA GPU, so nothing was checked"; \
	else \
		$(PYTHON) benchmarks/gpu_check.py --part $(PART) $(OPTIONS); \
	fi

gpu-check-dry: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu_check.py --dry --part $(PART) --result gpu_check_dry.json $(OPTIONS)

lock: $(VENV)/.dev
	$(BIN)/python requirements/lock.py

docs: $(VENV)/.runtime
	$(BIN)/python docs/configuration_page.py > docs/configuration.md

# --no-deps: two packages ask for companions of torch that break its CPU build (requirements/lock.py says which). The
# public package index serves torch's CUDA build only, so unless a configured index has the CPU one it comes from PyTorch.
$(VENV)/.runtime: requirements/cpu.lock pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, and $(PYTHON) is older; give one with make PYTHON=..."; exit 1; }
	@echo "setting up $(VENV): about 4 GB, a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps "$(TORCH)" || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH)"
	$(PIP) install --no-deps -r requirements/cpu.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(CUDA_VENV)/.installed: requirements/cuda.lock requirements/install_cuda.sh pyproject.toml setup.py
	@$(CUDA_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || \
		{ echo "cuda-check needs Python 3.12, for which requirements/cuda.lock is; give one with make CUDA_PYTHON=..."; exit 1; }
	@echo "setting up $(CUDA_VENV): about 10 GB, 5 to 15 minutes the first time; the checks take 5 more"
	test -x $(CUDA_VENV)/bin/python || $(CUDA_PYTHON) -m venv $(CUDA_VENV)
	requirements/install_cuda.sh $(CUDA_VENV) quick
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock
	$(PIP) install --no-deps -r requirements/dev.lock
	@touch $@
