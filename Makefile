# Variables: PYTHON (interpreter for .venv), ARGS (passed to the demo, pytest or chaos), ONLY (one benchmark), DURATION_S,
# JOBS (files of tests at once), SUITES (of test-boot).
PYTHON ?= python3
ARGS ?=
ONLY ?=
DURATION_S ?= 900
JOBS ?= 2
SUITES ?= bookworm trixie

BIN := .venv/bin
PACKAGES := broker edge_actor learner tests
# Whatever decides what gets installed; a stamp in .venv older than one of these is stale.
RECIPE := setup.cfg pyproject.toml constraints.txt
SHELL_SCRIPTS = .ci/run .ci/constraints $(shell find . \( -name .git -o -name .venv -o -name runs \) -prune -o -name '*.sh' -print)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench peers bench-peers chaos fuzz test-brokers test-trixie test-setup test-pi test-pi-all test-boot constraints clean

help: ## this list
	@echo 'make TARGET [PYTHON=python3.11] [ARGS="..."] [ONLY=name]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

demo: .venv/.runtime ## train CartPole with a broker, a learner and two int8 actors on this machine (ARGS="--env ...")
	@$(BIN)/actorq-learner demo $(ARGS)

test: .venv/.dev .venv/.tflite-runtime ## run the tests, two files at once (JOBS=0: one after the other; ARGS="-k name" picks some)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

check: .venv/.dev ## ruff, mypy, import-linter, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports
	@command -v shellcheck > /dev/null || { echo 'make: shellcheck is missing: apt install shellcheck' >&2; exit 1; }
	shellcheck $(SHELL_SCRIPTS)

bench: .venv/.dev ## run the benchmarks, one JSON object per line (ONLY=actor runs one)
	@$(BIN)/python -m tests.benchmarks $(ONLY)

peers: .venv/.peers ## install what the project is compared with (TensorFlow, PyTorch, ONNX Runtime, Stable-Baselines3), and check it
	.venv/peers/bin/python -m tests.benchmarks.peers.child

bench-peers: .venv/.dev .venv/.peers ## learning beside Stable-Baselines3, seed by seed; goes on where it was (ARGS="cartpole --seeds 3")
	@$(BIN)/python -m tests.benchmarks.peers $(ARGS)

chaos: .venv/.dev ## kill, cut and fill everything for DURATION_S seconds, and show that nothing is lost
	$(BIN)/python -m tests.system.chaos.__main__ --duration-s $(DURATION_S) $(ARGS)

fuzz: .venv/.dev ## 100 000 mutated payloads at each topic of learner and actor (FUZZ_PAYLOADS=n); about 20 minutes
	FUZZ_PAYLOADS=$${FUZZ_PAYLOADS:-100000} $(BIN)/python -m pytest tests/system/security/test_fuzz.py $(ARGS)

test-brokers: .venv/.dev ## what the contract needs of a broker, asked of all that are installed, or of yours (ARGS=HOST:PORT)
	@$(BIN)/python -m tests.broker.conformance $(ARGS)

test-trixie: ## as root: the actor's tests on Python 3.13, in a Debian Trixie root made by debootstrap
	tests/trixie/run.sh $(ARGS)

test-setup: .venv/.runtime ## as root: what must fail in setup_pi.sh, and its way back, in a Debian root at this machine's speed
	tests/pi/run.sh bookworm amd64

test-pi: .venv/.dev ## as root: set-up and actor on an emulated Raspberry Pi 4 (Bookworm, arm64), with a learner outside
	tests/pi/run.sh bookworm arm64 cortex-a72

test-pi-all: test-pi test-setup .venv/.tflite-runtime ## as root: the other cores (A53, A76), Trixie, and the 32-bit system too
	tests/pi/run.sh bookworm arm64 cortex-a53 cortex-a76
	tests/pi/run.sh trixie arm64 cortex-a53 cortex-a72 cortex-a76
	tests/pi/run.sh bookworm armhf cortex-a7

test-boot: .venv/.dev ## as root: a card of flash.sh boots in qemu, from its first boot to experience (SUITES=trixie)
	set -e; for suite in $(SUITES); do tests/pi/run.sh $$suite arm64 boot; done

constraints: .venv/.created ## resolve what is installed anew, on Linux x86-64, with network (ARGS=--upgrade for newer versions)
	@PYTHON=$(BIN)/python .ci/constraints $(ARGS)

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The venv is made once; each stamp says what was installed into it, so a second run does nothing.
.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'make: Python 3.11 or newer is needed, and $(PYTHON) is not: '"$$($(PYTHON) --version 2>&1)" >&2; \
	  echo '      apt install python3 python3-venv, or name one that is: make PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo 'make: $(PYTHON) cannot make virtual environments: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.runtime: .venv/.created $(RECIPE)
	@echo 'Installing into .venv: the first time this downloads about 700 MB, mostly TensorFlow, in 1 to 3 minutes.' >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[learner,watch,actor,local]'
	@touch $@

.venv/.dev: .venv/.runtime
	@echo 'Installing the test tools into .venv.' >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[learner,watch,actor,local,mujoco,atari,ray,dev]'
	@touch $@

# The runtime of 32-bit boards holds numpy below 2, so its tests run in an environment beside the other. It ended with
# Python 3.11: with a newer one, and where it has no wheel, those tests are skipped.
.venv/.tflite-runtime: .venv/.dev tests/tflite-runtime.txt
	@if $(BIN)/python -c 'from tests import runtimes; import sys; sys.exit(not runtimes.has_wheel())'; then \
	  $(BIN)/python -m venv --clear .venv/tflite-runtime && \
	  .venv/tflite-runtime/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
	    --require-hashes -r tests/tflite-runtime.txt; fi
	@touch $@

# What the project is compared with has an environment of its own. PyPI's PyTorch for Linux brings CUDA along, 2 GB of it;
# PyTorch's own index has one for the CPU, whose version counts as newer.
.venv/.peers: .venv/.created tests/peers.txt $(RECIPE)
	@echo 'Installing into .venv/peers: 3 GB when unpacked, mostly TensorFlow and PyTorch.' >&2
	@$(BIN)/python -m venv .venv/peers
	@.venv/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
	  --extra-index-url https://download.pytorch.org/whl/cpu "$$(grep '^torch==' tests/peers.txt)"
	@.venv/peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -r tests/peers.txt tensorflow -e '.[actor]'
	@touch $@
