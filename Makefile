# Everything that a fresh machine needs: Python 3.11 or newer with venv, and a network for pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One test more at a time than there are cores, since many tests wait; at most 4, since ranks are processes too.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal
# The tests that a lane runs, all by default; and the first seed of a soak run.
TESTS :=
SEED := $(shell date +%s)

.PHONY: demo test test-slow test-rare test-accelerator soak check docs docs-check format bench clean

demo: $(VENV)/.demo
	$(BIN)/rankwise launch -n 4 examples/digits.py --device cpu

test: $(VENV)/.installed
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not rare" $(TESTS)

test-rare: $(VENV)/.installed
	$(PYTEST) -m rare $(TESTS)

# On a simulated accelerator, which is built here once; it takes g++, and a minute.
test-accelerator: $(VENV)/.installed
	$(BIN)/python -m tests.accelerator.build .simdev
	PYTHONPATH=$(CURDIR)/.simdev $(PYTEST) -m "not rare" $(if $(TESTS),$(TESTS),tests/accelerator tests/gpu)

soak: $(VENV)/.installed
	$(PYTEST) -m soak --soak-seed $(SEED) $(TESTS)

check: $(VENV)/.installed
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

# The site in build/docs/html, and each of its pages as text; warnings are errors. No network is used.
SITE := build/docs/html
docs: $(VENV)/.docs
	rm -rf $(SITE)
	$(BIN)/python -m sphinx -c docs -d build/docs/doctrees -b html -q -E -W --keep-going . $(SITE)
	$(BIN)/python -m sphinx -c docs -d build/docs/doctrees -b text -q . $(SITE)/text
	@echo "$(CURDIR)/$(SITE)/index.html"

# What pages show: links, search, programs and commands, those that need Slurm or an accelerator where there is one.
docs-check: docs
	$(BIN)/python -m tools.check_site $(SITE)
	$(PYTEST) tests/test_docs.py tests/test_readme.py tests/test_recipes.py tests/testing/test_page.py \
		tests/test_docstrings.py tests/clusters/test_launchers_page.py tests/clusters/test_slurm_recipe.py

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/accessors.py
	$(BIN)/python benchmarks/hostlists.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/large_reductions.py
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python -m benchmarks.dropins
	$(BIN)/python -m benchmarks.objects
	$(BIN)/python -m benchmarks.growth --save docs
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/testing.py
	$(BIN)/python -m benchmarks.engines
	$(BIN)/python -m benchmarks.diagnosis
	$(BIN)/python -m benchmarks.hosts
	$(BIN)/python -m benchmarks.bench_command

clean:
	rm -rf $(VENV) .compat .simdev .xla build dist mutants.json

# Outside CI: the package as it would be released, and other versions of Python and torch (PY=3.12 TORCH=2.13.0: one;
# SLOW=1: all tests).
.PHONY: dist compat test-xla mutants
dist: $(VENV)/.installed
	$(BIN)/python -m tools.dist

compat: $(VENV)/.installed
	$(BIN)/python -m tools.compat $(if $(PY),--python $(PY)) $(if $(TORCH),--torch $(TORCH)) $(if $(SLOW),--slow) \
		$(if $(TESTS),--tests "$(TESTS)")

# Seeded faults, and whether tests that noticed one before do so no more.
mutants: $(VENV)/.installed
	rm -f mutants.json
	-$(BIN)/python -m tools.mutants --save mutants.json
	$(BIN)/python -m tools.mutants --compare tests/data/mutants.json mutants.json

# An environment of its own, with torch_xla: a download of 1 GB, once. IGNITE=CHECKOUT: the tests of PyTorch-Ignite.
test-xla:
	$(PYTHON) -m tools.xla_lane $(if $(TESTS),--tests "$(TESTS)") $(if $(IGNITE),--ignite "$(IGNITE)")

# The constraints come first: torch's CPU build is enough here, and its default one is gigabytes of CUDA.
PIP := $(BIN)/python -m pip install --disable-pip-version-check
INSTALL := $(PIP) --constraint constraints.txt --editable ".[examples]"

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL)
	touch $@

# All that the demo needs too. pip knows dependency groups from version 25.1 on.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=25.1"
	$(INSTALL) --group dev
	touch $(VENV)/.demo $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --constraint constraints.txt --group docs
	touch $@
