# Each target sets up what it needs, once. BACKEND=cuda uses MLX's CUDA build on Linux instead of the CPU one; FROM=shipped trains the guide on, for MINUTES.
# The first that is new enough: macOS' own python3 is 3.9, and stands before others on many a PATH.
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && exit; done; echo python3)
BACKEND ?= cpu
FROM ?= scratch
VENV := .venv
BIN := $(VENV)/bin
EDITABLE := --config-settings editable_mode=strict -e

# An editable install links file by file, so it is renewed when a file comes or goes.
FILES := $(shell find app engine quant assets -type f ! -name '*.pyc' ! -name .DS_Store | LC_ALL=C sort | cat - pyproject.toml | cksum | cut -d' ' -f1)
USE := $(VENV)/installed-$(BACKEND)-$(FILES)
DEV := $(VENV)/installed-dev-$(BACKEND)-$(FILES)

# Tests that load no model, draw no screen and start hardly a process: for between two edits, within a minute.
FAST := $(addprefix tests/, test_house.py test_layering.py test_docs.py engine/text engine/test_options.py \
	engine/test_sampling.py engine/test_units.py engine/test_files.py engine/test_metrics.py engine/model/test_config.py \
	engine/kv/test_attention.py engine/schedule/test_policy.py engine/schedule/test_capacity.py \
	engine/speculation/test_ledger.py engine/speculation/test_lookup.py engine/perf/test_roofline.py \
	app/chat/test_session.py app/chat/test_figures.py app/chat/test_versions.py app/chat/test_attachments.py \
	app/store/test_store.py app/test_latex.py)

.PHONY: chat test test-fast test-all test-real test-clients clients house models floors lint format bench bench-real soak peers guide golden golden-real roofline wheel clean

chat: $(USE)
	@$(BIN)/tokamac chat $(MODEL)

test: $(DEV)
	$(BIN)/python -m pytest

models: $(DEV)  # real models into a cache outside the repository; MODELS=all: those that only `make bench-real` measures, too
	@$(BIN)/python -m tests.real.fetch $(MODELS)

test-real: $(DEV)  # some two minutes
	$(BIN)/python -m pytest -m real -n 0 -rs --durations=10 tests/real

clients: $(DEV)  # real clients of the server into a cache outside the repository; npm for those in JavaScript
	@$(BIN)/python -m tests.clients.install

test-clients: $(DEV)  # each has a turn with a script behind the server; says which are absent
	$(BIN)/python -m pytest -m clients -n 0 -rs tests/clients

test-fast: $(DEV)
	$(BIN)/python -m pytest $(FAST)

house: $(DEV)  # what tests/house.toml bounds
	$(BIN)/python -m pytest -n 0 -rP tests/test_house.py

test-all: $(DEV)  # every model family, pair and example, where each run tries some of each kind
	$(BIN)/python -m pytest -m 'not real and not clients'

floors: $(DEV)  # all tests, with each dependency at the oldest version that pyproject.toml allows
	$(BIN)/pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/floors
	$(BIN)/uv pip install --quiet --python build/floors/bin/python --resolution lowest-direct $(EDITABLE) '.[test]'
	build/floors/bin/python -m pytest

lint: $(DEV) build/typed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typed $(BIN)/mypy -p tokamac.app -p tokamac.engine -p tokamac.quant -p tokamac.assets \
		-m tests.guide.dataset -m tests.guide.evaluate -m tests.guide.near_questions -m tests.guide.train \
		-m tests.roofline.fit_roofline -m tests.roofline.measurements

format: $(DEV)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(DEV)
	$(BIN)/python -m tests.bench

bench-real: MODELS = all
bench-real: models  # conversions and long runs on real models: hours
	$(BIN)/python -m tests.bench --real

soak: MINUTES = 120
soak: $(DEV)  # mixed clients on a server for so long; ten minutes of it are in `make test-all`
	TOKAMAC_SOAK_MIN=$(MINUTES) $(BIN)/python -m tests.bench --only soak_serve

peers: $(DEV)  # llama.cpp for the benchmarks, built for this processor: some minutes
	$(BIN)/pip install --quiet 'llama-cpp-python>=0.3.36'

guide: $(DEV)
	$(BIN)/pip install --quiet torch==2.13.0 safetensors
	.ci/make-guide $(BIN) $(FROM) $(MINUTES)

golden: $(DEV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m tests.golden.make

golden-real: models
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m tests.real.golden

roofline: $(DEV)
	$(BIN)/pip install --quiet 'scipy>=1.17'
	$(BIN)/python -m tests.roofline.fit_roofline

wheel: $(DEV)
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(BIN)/python:
	$(PYTHON) -I engine/requirements.py
	$(PYTHON) -m venv $(VENV)

$(USE): $(BIN)/python
	.ci/install $(BIN) $(BACKEND) $(EDITABLE) .
	@rm -f $(VENV)/installed-*; touch $@

$(DEV): $(BIN)/python
	.ci/install $(BIN) $(BACKEND) $(EDITABLE) '.[dev]'
	@rm -f $(VENV)/installed-*; touch $@ $(USE)

build/typed:  # the packages under their import names, for the type checker
	mkdir -p $@/tokamac
	for package in app engine quant assets; do ln -sfn ../../../$$package $@/tokamac/$$package; done
