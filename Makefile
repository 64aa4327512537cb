# The contributor's menu: `make` or `make help` lists it.
#
# Every target that needs Python packages makes its own environment first, from the pinned versions in
# .ci/constraints.txt. VENV=path puts it elsewhere, PYTHON=path picks the interpreter, ARGS="..." is
# handed on to pytest or to the ring-attn command, WORKERS=n runs so many files of tests side by side.
# PART=1/2 runs the first half of the slow tests, and PART=2/2 the second one.
# TRITON=3.6.0 installs that version into .aot/ and uses it for tests, `ptx` and `aot`. TORCH=2.11.0
# makes an environment of its own, .venv-2.11.0, with that torch and the triton that it asks for.

TORCH ?=
VENV ?= .venv$(TORCH:%=-%)
PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
TRITON ?=
MINUTES ?= 10
PART ?=
SEED ?= 0

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Processors round differently. CAPABILITY=default, avx2 or avx512 makes torch, oneDNN and MKL compute
# as a processor without more does; THREADS=2 gives each process two threads.
THREADS ?= 1
ONEDNN_default := SSE41
ONEDNN_avx2 := AVX2
ONEDNN_avx512 := AVX512_CORE
MKL_default := SSE4_2
MKL_avx2 := AVX2
MKL_avx512 := AVX512
ifdef CAPABILITY
  export ATEN_CPU_CAPABILITY := $(CAPABILITY)
  export ONEDNN_MAX_CPU_ISA := $(ONEDNN_$(CAPABILITY))
  export MKL_ENABLE_INSTRUCTIONS := $(MKL_$(CAPABILITY))
  # torch.compile finds code in its cache that was made for wider vectors, which then does not compile.
  export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.inductor/$(CAPABILITY)
endif

# Tests that compare numbers which torch computes.
ROUNDING := tests/unit/test_testing.py tests/unit/test_backends.py tests/unit/test_strategies.py \
	tests/unit/test_own_strategy.py tests/unit/test_parallel_style.py $(addprefix tests/distributed/test_, \
	audit.py context_parallel_names.py diffusers.py generation.py installed_kernels.py joint.py \
	logprobs.py mask_lists.py own_recurrence.py parallel_recurrence.py pooling.py recurrence.py \
	ring_flash_adapters.py strategies.py tensor_parallel.py transformers.py) \
	tests/integration/test_accelerate.py \
	tests/integration/test_examples.py tests/integration/test_trainers.py

# Another triton comes beside the environment, whose Python it is for, and before it.
AOT := .aot$(if $(filter .venv%,$(VENV)),$(VENV:.venv%=%),/$(notdir $(VENV)))
OTHER_TRITON := $(TRITON:%=$(AOT)/%/.ready)
WITH_TRITON := $(TRITON:%=PYTHONPATH=$(CURDIR)/$(AOT)/%)

# A distributed test runs several ranks on the same few cores: more threads a rank only fight. Files
# of tests run side by side, 3 on 2 cores since many wait for timeouts; WORKERS=0 runs them in one
# process, as a debugger wants it. Bytecode is kept, for the hundreds of processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(THREADS) $(WITH_TRITON) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test test-slow test-all test-rounding test-oldest ptx fuzz lint audit format run verify bench aot gpu gpu-prepare docs wheel release clean clean-dist

# Another torch asks for its own triton and setuptools.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,.ci/constraints.txt)
ifneq ($(TORCH),)
$(CONSTRAINTS): .ci/constraints.txt
	@mkdir -p $(@D)
	@{ grep -vE '^(torch|triton|setuptools)==' $<; echo 'torch==$(TORCH)'; } > $@
endif

# Two --quiet hide pip's warnings, as of index locations that do not exist; its errors are shown.
INSTALL := $(BIN)/python -m pip install --quiet --quiet -c $(CONSTRAINTS)
SIZES := torch, triton and the packages of tests and tools: about 0.6 GB to download and 2.4 GB on disk, \
	several GB more where pip takes the torch build with CUDA's libraries

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make the environment: .venv, or VENV=path
$(READY): pyproject.toml setup.py $(CONSTRAINTS)
	@echo "setup of $(VENV): $(SIZES)"
	@echo "setup 1/4: the environment, by $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup 2/4: setuptools and wheel"
	@$(INSTALL) 'setuptools>=77' wheel  # as pyproject.toml asks; the environment begins with an older one
	@echo "setup 3/4: torch and triton"
	@$(INSTALL) torch triton
	@echo "setup 4/4: ring_attn from this folder, and what its tests and tools need"
	@$(INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

test: $(READY) $(OTHER_TRITON)  ## run the tests, without the slow ones
	$(PYTEST) loadfile -m "not (slow or costly or gpu)" $(ARGS)

# pytest ends with 5 where ARGS select no slow test.
test-slow: $(READY) $(OTHER_TRITON)  ## run only the slow tests, or a part of them: PART=1/2
	$(PYTEST) worksteal -m "(slow or costly) and not gpu" $(PART:%=--part %) $(ARGS) || test $$? -eq 5

test-all: test test-slow  ## run every test that needs no GPU

test-rounding: $(READY)  ## the tests that compare numbers; CAPABILITY=default or avx2, THREADS=2
	$(PYTEST) loadfile -m "not slow and not gpu" $(ARGS) $(ROUNDING)

ptx: $(READY) $(OTHER_TRITON)  ## run the kernels' PTX on the CPU, and plant faults into it
	$(PYTEST) worksteal -m "not gpu" $(ARGS) tests/kernels/test_ptx*.py tests/kernels/test_hopper.py tests/kernels/test_blackwell.py

# A part that takes four minutes: what Gluon's kernels are compiled to, and planted faults in it;
# launches; the interpreter; the machine code of the backward.
test-oldest: TRITON := 3.6.0
test-oldest: $(READY)  ## a part of the kernels' tests, with the oldest triton
	$(MAKE) test TRITON=$(TRITON) ARGS="$(OLDEST_TESTS)"
	$(MAKE) test-slow TRITON=$(TRITON) ARGS="$(OLDEST_SLOW_TESTS)"
	$(MAKE) aot TRITON=$(TRITON) ARGS="$(OLDEST_CELLS)"

OLDEST_TESTS = $(patsubst %,tests/kernels/test_%.py,cache_keys flash hopper launches ptx)
OLDEST_SLOW_TESTS = tests/kernels/test_ptx.py tests/kernels/test_launches.py \
	-k 'hopper or sm_90-documents or repeated'
OLDEST_CELLS = --quiet --kernel hopper_bwd dkdv --arch sm_90 --head-dim 64 128 --dtype bfloat16

fuzz: $(READY)  ## random calls against float64 for MINUTES=10, from SEED=0
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(BIN)/python -m dev fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

lint: $(READY)  ## check style, format, types, and known vulnerabilities of packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if $(BIN)/python -c '$(ASK_OF_ONE)' 2>/dev/null; \
	then $(MAKE) audit; else echo "vulnerabilities: not looked for, PyPI does not answer"; fi

# Asks about one package as pip-audit does, before pip-audit asks about all of them.
ONE = $(shell sed -n 's|^torch==|torch/|p' .ci/constraints.txt)
ASK_OF_ONE = import urllib.request as u; from pip._internal.models.index import PyPI; \
	u.urlopen(PyPI.pypi_url + "/$(ONE)/json", timeout=5)

audit: $(VENV)/.audit  ## known vulnerabilities of the pinned packages
	$(BIN)/pip-audit --requirement .ci/constraints.txt --no-deps --disable-pip --progress-spinner off

$(VENV)/.audit: $(READY)
	$(INSTALL) --no-build-isolation -e '.[dev,audit]'
	@touch $@

format: $(READY)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

run: $(READY)  ## see it work: examples/train.py on 2 ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train.py $(ARGS)
	@echo "Shown: a transformer trained on 2 ranks, each with half of every sequence, and the same" \
		"losses as in one process. Next: read examples/quickstart.py, or try make verify"

verify: $(READY)  ## check every strategy against dense attention
	$(BIN)/ring-attn verify $(ARGS)

bench: $(READY)  ## time and memory of the ring: ring-attn bench ring
	$(BIN)/ring-attn bench ring $(ARGS)

aot: $(READY) $(OTHER_TRITON)  ## compile every kernel without a GPU
	$(WITH_TRITON) $(BIN)/python -m dev aot $(ARGS)

$(AOT)/%/.ready: | $(READY)
	$(BIN)/python -m pip install --quiet --quiet --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

# Where there is a GPU there is a torch for it: it is used as it is, and no environment is made.
gpu:  ## on a machine with a GPU, in 9 minutes: its tests and figures, into gpu-results/
	$(PYTHON) -m dev gpu $(ARGS)

gpu-prepare: $(READY) $(OTHER_TRITON)  ## before, without a GPU: compile its kernels into .carry/
	$(WITH_TRITON) $(BIN)/python -m dev gpu --prepare $(ARGS)

# The tools come beside the torch of the environment; nothing of CUDA is installed.
docs: $(VENV)/.docs  ## build the site of docs/ into docs/_build, with its reference
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html docs docs/_build

$(VENV)/.docs: $(READY)
	$(INSTALL) --no-build-isolation -e '.[dev,docs]'
	@touch $@

wheel: $(READY)  ## build the sdist and, from it, the wheel into dist/
	$(BIN)/python -m build --no-isolation

# ARGS="--torch-index https://download.pytorch.org/whl/cpu" installs torch without CUDA's libraries.
release: $(VENV)/.release clean-dist wheel  ## build a release, and try it as its users will
	$(BIN)/python -m dev release $(ARGS)

clean-dist:
	rm -rf dist

$(VENV)/.release: $(READY)
	$(INSTALL) --no-build-isolation -e '.[dev,release]'
	@touch $@

clean:  ## remove what builds and tools leave; the environment stays
	rm -rf build dist docs/_build docs/generated *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .inductor
	find ring_attn kernels bench examples tests -name __pycache__ -prune -exec rm -rf {} +
