# Needs Python 3.11 or newer and nothing else: every target makes the environment it works in.
#
#   make demo          set up and answer PROMPT with the demo target, with and without the drafter
#   make test          set up and run the tests
#   make test-lowest   the same tests on the oldest supported transformers
#   make lint          check style; `make format` repairs what can be repaired
#
# Arguments for pytest go into PYTEST_ARGS, for example: make test PYTEST_ARGS="-k targets -x -n 0". The tests run on two
# processes, each file on one of them; PROCESSES sets another number.

PYTHON ?= python3
PROMPT ?= Explain in three sentences why the sky is blue.
PYTEST_ARGS ?=
PROCESSES ?= 2
PYTEST := -m pytest -n $(PROCESSES) --dist loadfile $(PYTEST_ARGS)

# Without an NVIDIA GPU torch is pinned and installed first, so that nothing else chooses another build of it. Where pip
# is configured with an index or a folder of CPU wheels (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), it is taken from there.
TORCH := $(if $(shell nvidia-smi -L 2>/dev/null),torch,torch==2.13.0)

.PHONY: demo test test-lowest lint format clean

demo: .venv/.installed
	.venv/bin/hf-drelay generate "$(PROMPT)"

test: .venv/.installed
	.venv/bin/python $(PYTEST)

test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python $(PYTEST)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-lowest

# The newest transformers in one environment, the oldest supported one in the other; the stamp file is written last, so
# that an interrupted installation is done again.
.venv-lowest/.installed: TRANSFORMERS := transformers==5.17.0

%/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.11') if sys.version_info < (3, 11) else None"
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet "$(TORCH)"
	$*/bin/python -m pip install --quiet --editable ".[test,demo-target,dev]" $(TRANSFORMERS)
	touch $@
