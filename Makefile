# `make serve` and `make test` set up everything they need. The rest expects the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar on
STAMP := $(VENV)/.installed
TORCH := 2.13.0
# Asked beside pip's own indexes where there is no NVIDIA driver: PyPI has only the build that brings CUDA, gigabytes of it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# What tells that there is a driver. `make install NVIDIA=` takes the CPU build in any case.
NVIDIA ?= $(shell command -v nvidia-smi || ls /proc/driver/nvidia/version 2>/dev/null)
FAST_TESTS := tests/unit tests/contract
# What these hold against the clock, others beside them would hold up: they run by themselves, two at a time, since most
# of them wait most of the time.
ALONE := $(addprefix tests/integration/, test_admission.py test_overload.py test_cancel_latency.py test_goodput.py \
	test_transfer_processes.py)
SOAK := tests/chaos/test_streams.py
# Of the chaos tests, those that are short enough for every run.
SHORT_CHAOS := $(SOAK) tests/chaos/test_kills.py
# In the order in which they are begun: the longest first, so that no processor waits for one of them at the end.
LONGEST := tests/integration/test_real_model.py tests/kube $(addprefix tests/integration/test_, \
	plumbing.py scaling.py transfer_faults.py)
OTHERS := $(LONGEST) tests/observability $(SHORT_CHAOS) tests/integration tests/helm
# Of the others, what takes long and has a sibling that stays: the autoscaler live (the simulator runs the same
# function), the second story of a release (head lost, workers replaced, rolled back), what the real model answers with
# spoiled blocks that nobody checks and pulls between its workers (with arithmetic both stay), thousands of cancels
# (hundreds stay), `baton bench` on a cluster (its replay stays), most types of models over two ranks and a rank that
# hangs (two types and a killed rank stay).
LONG := tests/integration/test_autoscale.py::test_pools_follow_the_load \
	tests/kube/test_cluster.py::test_a_release_that_lives_through_more \
	tests/integration/test_real_model.py::test_spoiled_blocks_change_the_answer_when_nobody_checks \
	tests/integration/test_prefix_pull.py::test_a_pulled_prefix_gives_the_tokens_of_generate \
	tests/integration/test_bench.py tests/integration/test_cancel.py \
	tests/integration/test_tensor_parallel.py::test_a_tiny_model_of_every_other_type_answers_as_generate \
	'tests/integration/test_tensor_parallel.py::test_workers_of_several_ranks_serve_and_die_whole[hanging]'
export OMP_NUM_THREADS ?= 1

.PHONY: serve test chaos check proto bench clean install

install: $(STAMP)

# torch first and alone: whichever build is there, what is installed later keeps it. Where the CPU build cannot be had,
# as its index is out of reach, that costs seconds; the other one does the same. Beside a driver the CPU build is not
# wanted, although its version counts as the higher one.
ifeq ($(NVIDIA),)
INSTALL_TORCH = $(PIP) --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU_INDEX) torch==$(TORCH)+cpu 2>/dev/null
else
INSTALL_TORCH = $(PIP) 'torch==$(TORCH),!=$(TORCH)+cpu'
endif
$(STAMP): pyproject.toml
	@echo "==> Setting up $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> 1 of 2: torch, $(if $(NVIDIA),for GPUs,the CPU build: there is no NVIDIA driver)"
	@$(INSTALL_TORCH) || (echo "    not to be had; taking the build that pip finds"; $(PIP) torch==$(TORCH))
	@echo "==> 2 of 2: everything else";  $(PIP) -e '.[worker,local,dev]'
	@touch $(STAMP)

serve: $(STAMP)
	@$(BIN)/baton up --ask "The capital of France is"

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ALONE)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 25 $(OTHERS) \
		$(addprefix --ignore=,$(ALONE)) $(addprefix --deselect=,$(LONG))

# Ten minutes of faults under load, a minute of everything else, ten thousand cancels; `make test` has a part of it.
chaos: $(STAMP)
	CHAOS_SECONDS=60 $(BIN)/python -m pytest -s tests/chaos $(LONG) $(addprefix --ignore=,$(SOAK))
	CHAOS_SECONDS=600 $(BIN)/python -m pytest -s $(SOAK)

check: $(STAMP) proto-is-current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH=$(BIN):$$PATH $(BIN)/lint-imports
	$(BIN)/buf lint proto
	.ci/buf-breaking $(BIN)/buf
	@$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -q -n 2 $(FAST_TESTS); tests=$$?; wait $$types && exit $$tests

PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) proto/baton/v1/*.proto

proto: $(STAMP)
	$(call PROTOC,.)

.PHONY: generated
generated: $(STAMP)
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.chart_docs

.PHONY: proto-is-current
proto-is-current: $(STAMP)
	@rm -rf $(VENV)/proto && mkdir -p $(VENV)/proto
	@$(call PROTOC,$(VENV)/proto)
	@diff -r --exclude=__init__.py --exclude=__pycache__ $(VENV)/proto/baton/v1 baton/v1 \
		|| (echo "baton/v1 differs from proto/: run 'make proto' and commit the result"; exit 1)

bench: $(STAMP)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
