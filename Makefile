# Every target sets up what it needs in .venv, once, and again only when the lock files or the packaging change.
#   make quickstart              a whole GRPO run on this machine's CPU
#   make test | test-unit | lint  (CHANGED=1, or a revision: only tests that the change since then can reach)
#   make test-tools             tests of what is beside training: plans, proofs, the doctor, replays, benchmarks,
#                                launchers, reports, starters
#   make test-ci                what .ci/run tests: both of these, and the most important whole runs of test-slow
#   make test-slow              a short real run with every preset and option, and rare layouts, beyond what test runs
#   make cuda-check             the CUDA packages and our CUDA code on a machine without a GPU, as far as that goes: installs
#                               10 GB into .venv-cuda the first time
#   make gpu-check               what only a CUDA machine can check, with that machine's own packages; writes and prints a
#                                JSON (PART=torch_only: the part that needs no Ray, vLLM or Transformer Engine; image: the
#                                rest; OPTIONS: of benchmarks/gpu_check.py)
#   make gpu-check-dry           the same checks without a GPU, as far as they go: tests the checks
#   make lock | docs             write requirements/*.lock (from the package index); docs/configuration.md, the table of models
#   make docs-site               the docs as a site with search in outputs/docs-site, and its llms.txt
# PYTHON chooses the interpreter (3.12 or newer); requirements/find_python.sh looks for one otherwise.
VENV := .venv
CUDA_VENV := .venv-cuda
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
EDITABLE := -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --editable .
PYTEST := $(BIN)/python -m pytest $(if $(CHANGED),-p tests.support.changed)
MARKS := not slow and not later
# More workers than two cores: a quarter of the time of tests is waiting, for processes that start and for deadlines.
PYTEST_UNIT = $(PYTEST) -m "$(MARKS)" -n 4 --durations=10
PYTEST_BY_FILE = $(PYTEST) -m "$(MARKS)" -n 3 --dist loadfile --no-loadscope-reorder --durations=10
# Tests of commands beside training, and of benchmarks.
UNIT_TOOLS := $(addprefix tests/unit/,planning verification config/test_gpu_recipes.py test_changed.py \
    launch test_gpu_check.py test_installation.py test_launchers.py test_models_page.py test_new.py test_plan.py \
    test_refit_plan.py test_same_numbers.py test_scale.py test_wheel.py)
RUN_TOOLS := $(addprefix tests/parity/,test_doctor_replay.py test_replay.py test_rounding.py test_verify.py \
    test_verify_loss.py) \
    $(addprefix tests/integration/,test_doctor.py test_new_run.py test_replay.py test_replay_runs.py test_report.py \
    test_launch.py test_slurm.py test_tutorial.py test_watch.py)
PART := all
OPTIONS :=
SHELL_SCRIPTS := $(wildcard launchers/*.sh launchers/*.sbatch requirements/*.sh) .ci/run

# Tests start some hundreds of Python processes, and images often set this: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: quickstart test test-tools test-ci test-slow test-unit lint lint-types lint-form \
    cuda-check gpu-check gpu-check-dry lock docs docs-site

quickstart: $(VENV)/.runtime
	$(BIN)/python -m megatron_grpo.train +exp=quickstart

test: $(VENV)/.dev
	$(PYTEST_UNIT) $(addprefix --ignore=,$(UNIT_TOOLS)) tests/unit
	$(PYTEST_BY_FILE) $(addprefix --ignore=,$(RUN_TOOLS)) tests/parity tests/integration

test-tools: $(VENV)/.dev
	$(PYTEST_UNIT) $(UNIT_TOOLS)
	$(PYTEST_BY_FILE) $(RUN_TOOLS)

test-ci: MARKS := (not slow or ci) and not later
test-ci: $(VENV)/.dev
	$(PYTEST_UNIT) tests/unit
	$(PYTEST_BY_FILE) tests/parity tests/integration

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow or later" -n 2 tests/unit
	$(BIN)/python -m pytest -m "slow or later" tests/parity
	$(BIN)/python -m pytest -m "slow or later" -n 2 --dist loadfile tests/integration

test-unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 tests/unit

lint: lint-types lint-form

lint-types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy benchmarks

lint-form: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/hadolint docker/Dockerfile.*

cuda-check: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/python -m tests.cuda

gpu-check:
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		echo "gpu-check: this machine has no CUDA GPU, so nothing was checked"; \
	else \
		$(or $(PYTHON),python3) benchmarks/gpu_check.py --part $(PART) $(OPTIONS); \
	fi

gpu-check-dry: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu_check.py --dry --part $(PART) --result gpu_check_dry.json $(OPTIONS)

lock: $(VENV)/.dev
	$(BIN)/python requirements/lock.py

docs: $(VENV)/.runtime
	$(BIN)/python docs/configuration_page.py > docs/configuration.md
	$(BIN)/python docs/models_page.py

docs-site: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict
	@echo "outputs/docs-site/index.html"

# An environment of an older Python is made anew.
define make_environment
	@$(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || \
		{ python=$$(requirements/find_python.sh $(PYTHON)) && "$$python" -m venv --clear $(1); }
endef

$(VENV)/.runtime: requirements/cpu.lock requirements/install_cpu.sh pyproject.toml setup.py
	$(call make_environment,$(VENV))
	@echo "setting up $(VENV): 4 to 7 GB, a few minutes the first time"
	requirements/install_cpu.sh $(VENV)
	$(BIN)/python $(EDITABLE)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock
	requirements/uv_or_pip.sh $(VENV) --no-deps --requirement requirements/dev.lock
	@touch $@

$(CUDA_VENV)/.installed: requirements/cuda.lock requirements/install_cuda.sh pyproject.toml setup.py
	$(call make_environment,$(CUDA_VENV))
	@echo "setting up $(CUDA_VENV): about 10 GB, 5 to 15 minutes the first time; the checks take 5 more"
	requirements/install_cuda.sh $(CUDA_VENV) quick
	$(CUDA_VENV)/bin/python $(EDITABLE)
	@touch $@

$(DOCS_VENV)/.installed: pyproject.toml
	$(call make_environment,$(DOCS_VENV))
	requirements/uv_or_pip.sh $(DOCS_VENV) $$($(DOCS_VENV)/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@
