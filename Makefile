# make demo   everything on a fresh machine: install, then `ds41ctl up --profile cpu-tiny`
# make test   every test, the real CPU engine end to end included; its parts: lint, test-fast, test-crash, test-engine,
#             test-e2e. make test-slow adds the ten-minute soak and the other long forms.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_PYTEST := build/engine-pytest
KERNEL_TOOLCHAIN := build/kernel-toolchain
KERNEL_BUILD := kernels/ds41_kernels/ds41_kernels/build.py
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-fast test-crash test-engine test-e2e test-slow kernel-toolchain lint bench clean system \
  system-test dev

demo: $(BIN)/.installed
	$(BIN)/ds41ctl up --profile cpu-tiny

# ---- system packages: installed where this user may, otherwise the one line that does it
system:
	@sh .ci/system-packages tmux $(PYTHON)

system-test:
	@sh .ci/system-packages "tmux strace gcc g++ openssl git" $(PYTHON)

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

PYTEST := $(BIN)/python -m pytest
# contract tests that take long: real venvs and pip, a profile walked to ready, mounts, engines that stand still, many bytes
LONG := $(addprefix tests/contract/test_,container_engine.py engine_install.py engine_release.py engram_mount.py \
  fetch_cli.py soak_cli.py tensors_fetch.py walk_cmp170hx.py)

# three for two cores: many tests wait for a clock; worksteal: who is through takes over what others still have to do
test-fast: $(BIN)/.dev
	$(PYTEST) -n 3 --dist worksteal tests/unit tests/contract $(addprefix --ignore=,$(LONG))

# a death at every system call that matters, one process each; and the long contract tests
test-crash: $(BIN)/.dev
	$(PYTEST) -n 2 --dist worksteal tests/crash $(LONG)

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

test-e2e: $(BIN)/.dev $(KERNEL_TOOLCHAIN)/.installed
	$(PYTEST) tests/e2e

test: lint test-fast test-crash test-engine test-e2e

# needs what test-engine installs
test-slow: $(BIN)/.dev
	$(BIN)/ds41ctl engine install --profile cpu-tiny
	DS41_TEST_SLOW=1 $(PYTEST) tests/e2e/test_cpu_tiny_load.py tests/e2e/test_supervision.py

bench: $(BIN)/.dev
	$(BIN)/python -m tests.bench
	$(BIN)/ds41ctl engine install --profile cpu-tiny
	env -u PYTHONDONTWRITEBYTECODE "$$($(BIN)/ds41ctl engine path --profile cpu-tiny)" -m tests.bench.exl3

clean:
	rm -rf $(VENV) build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
