# syntax=docker/dockerfile:1.7
# A Ray node with all that a worker needs, and the controller: torch, Ray, the Kubernetes client.
#   docker build -f deploy/docker/worker.Dockerfile -t baton-worker:0.1.0 .                                 for CPUs
#   docker build -f deploy/docker/worker.Dockerfile --build-arg VARIANT=cuda -t baton-worker:0.1.0-cuda .   for GPUs
# The nodes' NVIDIA driver has to be 580 or newer. For 525 and newer: --build-arg CUDA=cu129 or CUDA=cu126.

# A release adds the digest: --build-arg PYTHON=3.11.11-slim-bookworm@sha256:... A base of your own has Debian 12 and Python
# 3.11.3 or newer in /usr/local: --build-arg PYTHON_IMAGE=registry.example/python --build-arg PYTHON=TAG
ARG PYTHON_IMAGE=python
ARG PYTHON=3.11.11-slim-bookworm
ARG VARIANT=cpu
ARG CUDA=cu130
# Torch's own indexes, each below a name such as cpu. PyPI has the build for cu130.
ARG TORCH_INDEX=https://download.pytorch.org/whl

FROM ${PYTHON_IMAGE}:${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A mirror of PyPI, and a folder or page with more files. The locks' hashes hold in any case.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /build
RUN python -c "import sys; sys.exit(sys.version_info < (3, 11, 3) and 'the base image needs Python 3.11.3 or newer')" \
    && python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY deploy/docker/locks/ locks/

# torch first, as its builds have indexes of their own; `make lock` says what is installed, file by file.
FROM base AS build-cpu
ARG TORCH_INDEX
RUN pip install --only-binary=:all: --no-deps --require-hashes \
    --index-url "${TORCH_INDEX}/cpu" -r locks/torch-cpu.txt

# Its wheels bring the CUDA libraries and NCCL; the driver is the node's. PyPI has the newest CUDA's.
FROM base AS build-cu130
RUN pip install --only-binary=:all: --no-deps --require-hashes -r locks/torch-cu130.txt
FROM base AS build-cu129
ARG TORCH_INDEX
RUN pip install --only-binary=:all: --no-deps --require-hashes \
    --index-url "${TORCH_INDEX}/cu129" -r locks/torch-cu129.txt
FROM base AS build-cu126
ARG TORCH_INDEX
RUN pip install --only-binary=:all: --no-deps --require-hashes \
    --index-url "${TORCH_INDEX}/cu126" -r locks/torch-cu126.txt
# hadolint ignore=DL3006
FROM build-${CUDA} AS build-cuda

# hadolint ignore=DL3006
FROM build-${VARIANT} AS build
ENV PIP_NO_CACHE_DIR=1
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /build
RUN pip install --only-binary=:all: --no-deps --require-hashes -r locks/worker.txt \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --only-binary=:all: --no-deps --require-hashes -r locks/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && pip install --no-deps wheels/*.whl \
    && pip check
# The native step for each instruction set that it knows: the CPU image has no compiler. Run elsewhere than in the
# source's folder, it is the installed package that gets the libraries.
WORKDIR /
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && python -m engine.native.build

FROM ${PYTHON_IMAGE}:${PYTHON} AS final-cpu

# What CUDA asks of the driver: with an older one the container does not start, instead of computing on the CPU.
FROM ${PYTHON_IMAGE}:${PYTHON} AS driver-cu126
ENV NVIDIA_REQUIRE_CUDA="cuda>=12.0"
FROM ${PYTHON_IMAGE}:${PYTHON} AS driver-cu129
ENV NVIDIA_REQUIRE_CUDA="cuda>=12.0"
FROM ${PYTHON_IMAGE}:${PYTHON} AS driver-cu130
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"

# hadolint ignore=DL3006
FROM driver-${CUDA} AS final-cuda
# For NCCL over InfiniBand and RoCE, and the compiler and headers with which Triton builds a kernel's launcher at its first
# use (Python's own headers are in the base image). Debian keeps no old versions, so there is none to name.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc ibverbs-providers libc6-dev libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
# What the NVIDIA container runtime lends: nothing to a container that does not ask (the controller, Ray's head); the device
# plugin and `docker run --gpus` put the GPUs that they lend in place of void. The root file system may be read-only.
ENV NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CC=gcc \
    TRITON_CACHE_DIR=/var/cache/baton/triton

# hadolint ignore=DL3006
FROM final-${VARIANT}
ARG VARIANT
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="baton-worker" \
      org.opencontainers.image.description="Workers and controller of Baton, a disaggregated serving cluster for large language models (${VARIANT})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 1000 baton \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin baton \
    && install -d -o 1000 -g 1000 /etc/baton /tmp/ray /var/cache/baton /var/lib/baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    BATON_CACHE=/var/cache/baton \
    HF_HOME=/var/cache/baton/huggingface
USER 1000:1000
WORKDIR /home/baton
# A Ray node's command has the address of its head: the chart and compose.yaml give it.
CMD ["baton", "doctor", "--part", "worker"]
