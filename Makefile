# make demo   everything on a fresh machine: install, then `ds41ctl up --profile cpu-tiny`
# make test   lint-free full test run, the real CPU engine end to end included
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_PYTEST := build/engine-pytest
KERNEL_TOOLCHAIN := build/kernel-toolchain
KERNEL_BUILD := kernels/ds41_kernels/ds41_kernels/build.py
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-fast test-engine kernel-toolchain lint bench clean system system-test dev

demo: $(BIN)/.installed
	$(BIN)/ds41ctl up --profile cpu-tiny

# ---- system packages: installed where this user may, otherwise the one line that does it
system:
	@sh .ci/system-packages tmux $(PYTHON)

system-test:
	@sh .ci/system-packages "tmux strace gcc" $(PYTHON)

$(BIN)/python: | system
	$(PYTHON) -m venv $(VENV)

$(BIN)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(BIN)/.dev: pyproject.toml $(BIN)/.installed | system-test
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

dev: $(BIN)/.dev

# ---- tests
lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast: $(BIN)/.dev
	$(BIN)/python -m pytest -n 2 -m "not engine" tests/unit tests/contract tests/crash

# the tests of the engine's plugin run inside the engine's venv; pytest is lent to it from outside
$(ENGINE_PYTEST)/.installed: | $(BIN)/.dev
	$(BIN)/python -m pip install -q --target $(ENGINE_PYTEST) pytest hypothesis
	@touch $@

# the GPU kernels' compiler and a disassembler that knows sm_70, as wheels: no GPU, driver or CUDA toolkit is needed
$(KERNEL_TOOLCHAIN)/.installed: $(KERNEL_BUILD) | $(BIN)/.dev
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(KERNEL_TOOLCHAIN) \
	  $$($(BIN)/python $(KERNEL_BUILD) --pins) triton==3.3.1
	@touch $@

kernel-toolchain: $(KERNEL_TOOLCHAIN)/.installed

test-engine: $(ENGINE_PYTEST)/.installed $(KERNEL_TOOLCHAIN)/.installed
	$(BIN)/ds41ctl engine install --profile cpu-tiny
	env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=$(ENGINE_PYTEST) DS41_NVRTC_PATH=$(KERNEL_TOOLCHAIN) \
	  "$$($(BIN)/ds41ctl engine path --profile cpu-tiny)" -m pytest -q -c tests/engine/pytest.ini tests/engine

test: lint test-fast test-engine
	$(BIN)/python -m pytest -m engine tests/e2e

bench: $(BIN)/.dev
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
