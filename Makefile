# Two commands from a fresh clone, with nothing but Python 3.10+ and make: `make bench` and `make test`.
# To use an environment that you have, with torch in it: `make test PYTHON=python3 VENV=`.

PYTHON ?= python3
VENV ?= .venv
ifneq ($(VENV),)
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
else
RUN := $(PYTHON)
READY :=
endif

.PHONY: bench test test-ascend solution lint clean

bench: $(READY)
	$(RUN) -m bench --size small

# There is a process for each core, and torch's threads of one would spin where those of another could run.
test test-ascend: export OMP_WAIT_POLICY ?= PASSIVE
XDIST := -n auto --dist worksteal

# Once as it is, and, where there is no GPU, the Triton kernels once more, in Triton's interpreter. In both on all cores.
test: $(READY)
	$(RUN) -m pytest $(XDIST) $(ARGS)
	$(RUN) -c 'import torch; raise SystemExit(torch.cuda.is_available())' || exit 0; \
	TRITON_INTERPRET=1 SPARSE_ATTN_TEST_REQUIRE=triton $(RUN) -m pytest $(XDIST) --backend triton \
	tests/test_backends.py tests/test_triton.py tests/test_stress.py $(ARGS)

# The Ascend 910B backends, without one: two environments of their own, and LLVM 19's tools. See docs/ascend.md.
ASCEND := .venv-ascend
NPU := .venv-npu
test-ascend: $(ASCEND)/.ready $(NPU)/.ready
	TRITON_INTERPRET=1 $(ASCEND)/bin/python -m pytest $(XDIST) tests/ascend/test_interpreted.py $(ARGS)
	SPARSE_ATTN_ASCENDNPU_IR=$(CURDIR)/$(ASCEND)/compilers $(ASCEND)/bin/python -m pytest $(XDIST) \
	tests/ascend/test_linalg.py tests/ascend/test_compiles.py tests/ascend/test_traffic.py $(ARGS)
	LD_LIBRARY_PATH=$(CURDIR)/$(NPU)/cann TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU)/bin/python -m pytest \
	tests/ascend/test_torch_npu_schema.py $(ARGS)

# The one file that does what the package does; a test compares it with what this would write.
solution: $(READY)
	$(RUN) -m bench.make_solution

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf .venv $(ASCEND) $(NPU) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/.ready: requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "needs Python 3.10 or newer, got " + sys.version.split()[0] + ": make PYTHON=python3.x ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

PIP := bin/python -m pip install --quiet --disable-pip-version-check
$(ASCEND)/.ready: tests/ascend/requirements.txt
	@test -x /usr/lib/llvm-19/bin/mlir-opt || { echo "needs LLVM 19: apt-get install mlir-19-tools libmlir-19 llvm-19 clang-19"; exit 1; }
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/$(PIP) -r tests/ascend/requirements.txt
	for version in 1.2.0 1.1.0 1.0.0; do \
	$(ASCEND)/$(PIP) --no-deps --target $(ASCEND)/compilers/$$version ascendnpu-ir==$$version || exit 1; done
	@touch $@

$(NPU)/.ready: tests/ascend/stub_cann.py
	$(PYTHON) -m venv $(NPU)
	$(NPU)/$(PIP) torch==2.13.0 torch-npu==2.13.0 'numpy<2.4' pyyaml pytest
	$(NPU)/bin/python tests/ascend/stub_cann.py $(NPU)/cann
	@touch $@
