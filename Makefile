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

.PHONY: chat test floors lint format bench peers guide golden roofline wheel clean

chat: $(USE)
	@$(BIN)/tokamac chat $(MODEL)

test: $(DEV)
	$(BIN)/python -m pytest

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
	$(BIN)/python -m tests.benchmarks

peers: $(DEV)  # llama.cpp for the benchmarks, built for this processor: some minutes
	$(BIN)/pip install --quiet 'gguf>=0.17' 'llama-cpp-python>=0.3.36'

guide: $(DEV)
	$(BIN)/pip install --quiet torch==2.13.0 safetensors
	.ci/make-guide $(BIN) $(FROM) $(MINUTES)

golden: $(DEV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m tests.golden.make

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
