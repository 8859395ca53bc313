# Everything that a checkout can do. Needs Python 3.11 or newer with venv, git and make; the rest comes with `make`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What was installed last: the package alone, or with all that its tests need.
ALONE := $(VENV)/.installed
TOOLS := $(VENV)/.installed-dev
PINS := pyproject.toml constraints.txt
# Each other torch has an environment of its own: make test-torch VERSION=...
TORCH_VENV := .venv-torch-$(VERSION)
RUN := runs/demo
ONE := runs/demo-one
# The slow tests take hours on two cores. Each day has its eighth of them, which has a share of each table.
PART ?= $(shell expr $$(date +%j) % 8 + 1)/8

# What other programs start, on the real ones as far as this machine has them: sshd, Slurm, Open MPI, Ray, Spark, Kubernetes.
LAUNCHERS := $(addprefix tests/launch/test_,engines.py ssh.py slurm.py ray_and_spark.py kubernetes.py nodes_auto.py \
  launch_function.py torchrun_mpi_srun.py)
ENGINES := $(LAUNCHERS) tests/integrations/test_parquet.py
COLD := $(addprefix tests/launch/test_,agent.py agent_ends.py clean_exit.py) tests/cli/test_errors.py

# Else each of the thousands of processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch test-all mutants engines lint types docs dist bench gallery gpu clean

# $(call install,WHAT,VENV,TORCH): one command line for all, or pip would fetch another torch first, which is several
# gigabytes. TORCH is pip's way to say which torch.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Paceline needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@test -x $(2)/bin/pip || $(PYTHON) -m venv --clear $(2)
	@echo "installing $(1) into $(2) ..."
	@$(2)/bin/python -m pip install --quiet --disable-pip-version-check $(3) -e "$(1)"
endef

help: ## print this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do printf '%-14s %s\n' "$$target" "$$text"; done

$(ALONE): $(PINS)
	$(call install,.,$(VENV),-c constraints.txt)
	@touch $@

$(TOOLS): $(PINS)
	$(call install,.[dev],$(VENV),-c constraints.txt)
	@touch $(ALONE) $@

$(TORCH_VENV)/.installed: $(PINS)
	$(if $(VERSION),,$(error say which torch: make test-torch VERSION=2.15.0))
	$(call install,.[dev],$(TORCH_VENV),"torch==$(VERSION)")
	@touch $@

# One worker on as many threads as each of the two will have: what is compared is the number of workers.
THREADS = $(shell $(BIN)/python -c 'import os; print(max(1, len(os.sched_getaffinity(0)) // 2))')

demo: $(ALONE) ## train a small GPT on this Python's own source with two workers, and report
	@rm -rf $(RUN) $(ONE) $(ONE).log
	@mkdir -p runs
	@echo "a few steps with one worker first, to compare the speed with ..."
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(BIN)/paceline run --workers 1 --steps 100 --run-dir $(ONE) \
	  examples/gpt.py > $(ONE).log 2>&1 || { cat $(ONE).log; exit 1; }
	@$(BIN)/paceline run --workers 2 --run-dir $(RUN) --against $(ONE) examples/gpt.py
	@echo "open $(RUN)/report.html in a browser: it needs nothing but that file"

# Types are checked beside the tests, and told of after them. Four tests at a time: each waits for something now and then.
test: lint ## lint, types, and all tests but the slow ones
	@$(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; \
	  $(BIN)/pytest -m "not slow" -n 4 --dist worksteal; tests=$$?; \
	  wait $$types || tests=1; cat $(VENV)/types.log; exit $$tests

# pip's own settings say where that torch comes from. The last line has the counts of passed, failed and skipped tests.
test-torch: $(TORCH_VENV)/.installed ## the fast tests on another torch: make test-torch VERSION=2.15.0
	@$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(TORCH_VENV)/bin/pytest -m "not slow" -n 4 --dist worksteal

# What starts workers is tested both ways: forked from a warm process, and cold.
test-all: lint types ## lint, types, the fast tests and an eighth of the slow ones, by the day; all of them: make test-all PART=1/1
	@echo "part $(PART) of the slow tests ..."
	@$(BIN)/pytest -n 3 --dist worksteal --slow-part $(PART)
	@PACELINE_COLD_START=1 $(BIN)/pytest -n 3 --dist worksteal --slow-part $(PART) $(COLD)

# It stays out of the way of what else the machine does, as it takes long.
mutants: $(TOOLS) ## forty mistakes, one at a time in a copy of the tree: do the tests find them; an hour or two
	@nice $(BIN)/python tests/mutation_check.py --record runs/mutations.json

engines: $(TOOLS) ## the tests of ssh, Slurm, MPI, Ray, Spark and Kubernetes, on real ones where they are installed
	@$(BIN)/pytest -n 2 --dist loadfile $(ENGINES)

docs: $(TOOLS) ## build the documentation site, with its search, into docs/_build/html
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html in a browser"

lint: $(TOOLS) ## ruff: rules and format; codespell: spelling
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/codespell

types: $(TOOLS) ## mypy, strict
	@$(BIN)/mypy

dist: $(TOOLS) ## build the wheel and the source archive into dist
	@rm -rf dist
	@$(BIN)/python -m build --quiet
	@ls dist

bench: $(TOOLS) ## step time, sharded, cut and contrastive steps, a tiny one, memory, a GPU, sums, checkpoints and start beside their peers
	@$(BIN)/python benchmarks/step_time.py
	@$(BIN)/python benchmarks/sharded.py
	@$(BIN)/python benchmarks/tensor.py
	@$(BIN)/python benchmarks/experts.py
	@$(BIN)/python benchmarks/pipeline.py --bubble
	@$(BIN)/python benchmarks/pipeline.py --against torch
	@$(BIN)/python benchmarks/whole_batch.py
	@$(BIN)/python benchmarks/tiny.py
	@$(BIN)/python benchmarks/memory.py
	@$(BIN)/python benchmarks/gpu.py
	@$(BIN)/python benchmarks/all_reduce.py
	@$(BIN)/python benchmarks/saving.py
	@$(BIN)/python benchmarks/start_up.py

gallery: $(TOOLS) ## the reports of docs/gallery.md anew, from small runs; needs a chromium
	@$(BIN)/python benchmarks/gallery.py

# Offline with PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER, where a folder has the wheels.
gpu: $(TOOLS) ## with CUDA, in ten minutes: the GPU tests, GPT-2 beside plain torch and DDP, and a record of both
	@$(BIN)/python benchmarks/gpu.py --tests --record benchmarks/records/gpu-$$(date +%F).json

clean: ## remove what was installed, built and cached; runs/ stays
	@rm -rf $(VENV) .venv-torch-* build dist docs/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
