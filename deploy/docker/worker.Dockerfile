# syntax=docker/dockerfile:1.7
# A Ray node with all that a worker needs, and the controller: torch, Ray, the Kubernetes client.
#   docker build -f deploy/docker/worker.Dockerfile -t baton-worker:0.1.0 .                                 for CPUs
#   docker build -f deploy/docker/worker.Dockerfile --build-arg VARIANT=cuda -t baton-worker:0.1.0-cuda .   for GPUs

ARG PYTHON=3.11.11-slim-bookworm
ARG VARIANT=cpu

FROM python:${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY pyproject.toml deploy/docker/requirements.py ./

# torch first and alone: of the two builds of one version, whatever is installed later keeps the one that is there.
FROM base AS build-cpu
RUN python requirements.py --only worker:torch > torch.txt \
    && pip install --only-binary=:all: --index-url https://download.pytorch.org/whl/cpu -r torch.txt

# Its wheels bring the CUDA libraries and NCCL; the driver is the node's.
FROM base AS build-cuda
RUN python requirements.py --only worker:torch > torch.txt \
    && pip install --only-binary=:all: -r torch.txt

# hadolint ignore=DL3006
FROM build-${VARIANT} AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /build
RUN python requirements.py worker local:gguf local:lightkube local:ray > requirements.txt \
    && pip install --only-binary=:all: -r requirements.txt
COPY . .
RUN pip install --no-deps .
# The native step for each instruction set that it knows: the image itself has no compiler. Run elsewhere than in the
# source's folder, it is the installed package that gets the libraries.
WORKDIR /
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && python -m baton.engine.native.build

FROM python:${PYTHON} AS final-cpu

FROM python:${PYTHON} AS final-cuda
# For NCCL over InfiniBand and RoCE. Debian keeps no old versions, so there is none to name.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
# What the NVIDIA container runtime lends.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

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
