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

.PHONY: bench test lint clean

bench: $(READY)
	$(RUN) -m bench --size small

# Once as it is, and, where there is no GPU, the Triton kernels once more, in Triton's interpreter. In both on all cores.
test: $(READY)
	$(RUN) -m pytest -n auto $(ARGS)
	$(RUN) -c 'import torch; raise SystemExit(torch.cuda.is_available())' || exit 0; \
	TRITON_INTERPRET=1 SPARSE_ATTN_TEST_REQUIRE=triton $(RUN) -m pytest -n auto --backend triton \
	tests/test_backends.py tests/test_triton.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/.ready: requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "needs Python 3.10 or newer, got " + sys.version.split()[0] + ": make PYTHON=python3.x ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
