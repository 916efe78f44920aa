# syntax=docker/dockerfile:1.7
# A Ray node whose workers compute with vLLM (engine.runner: vllm), and the controller: vLLM's own image, and Baton with its
# own torch in an environment beside vLLM's. The head of such a cluster has this image, too: Ray wants one Python everywhere.
#   docker build -f deploy/docker/worker-vllm.Dockerfile -t baton-worker:0.1.0-vllm .

# A release adds the digest: --build-arg VLLM=v0.33.0@sha256:... An image of your own has a supported vLLM, and Python 3.11
# or 3.12 with the module venv: --build-arg VLLM_IMAGE=registry.example/vllm --build-arg VLLM=TAG, and
# --build-arg VLLM_PYTHON=/opt/vllm/bin/python if its interpreter is not the system's.
ARG VLLM_IMAGE=vllm/vllm-openai
ARG VLLM=v0.33.0

FROM ${VLLM_IMAGE}:${VLLM} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A mirror of PyPI, and a folder or page with more files. The locks' hashes hold in any case.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG VLLM_PYTHON=/usr/bin/python3
WORKDIR /build
RUN "${VLLM_PYTHON}" -c "import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)) and 'no lock for this Python')" \
    && "${VLLM_PYTHON}" -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY deploy/docker/locks/ locks/
# torch with CUDA, as in worker.Dockerfile: with it a worker finds its GPUs. vLLM's torch is not touched.
RUN pip install --only-binary=:all: --no-deps --require-hashes -r locks/torch-cu130.txt
RUN pip install --only-binary=:all: --no-deps --require-hashes -r locks/worker.txt \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --only-binary=:all: --no-deps --require-hashes -r locks/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && pip install --no-deps wheels/*.whl \
    && pip check
# Run elsewhere than in the source's folder, it is the installed package that judges the image's vLLM.
WORKDIR /
RUN python -c "from engine.vllm.versions import *; require_supported(installed_version('${VLLM_PYTHON}'))"

FROM ${VLLM_IMAGE}:${VLLM}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="baton-worker" \
      org.opencontainers.image.description="Workers and controller of Baton, a disaggregated serving cluster for large language models (vLLM)" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Ubuntu may have a user of this number already.
USER 0:0
RUN groupadd --non-unique --gid 1000 baton \
    && useradd --non-unique --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin baton \
    && install -d -o 1000 -g 1000 /etc/baton /tmp/ray /var/cache/baton /var/lib/baton
COPY --from=build /opt/baton /opt/baton
ARG VLLM_PYTHON=/usr/bin/python3
# NVIDIA_...: as in worker.Dockerfile. vLLM compiles kernels at its start, and the root file system may be read-only.
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    BATON_CACHE=/var/cache/baton \
    BATON_ENGINE_RUNNER=vllm \
    BATON_ENGINE_VLLM_PYTHON=${VLLM_PYTHON} \
    HF_HOME=/var/cache/baton/huggingface \
    TRITON_CACHE_DIR=/var/cache/baton/triton \
    FLASHINFER_WORKSPACE_BASE=/var/cache/baton/flashinfer \
    VLLM_CACHE_ROOT=/var/cache/baton/vllm \
    VLLM_CONFIG_ROOT=/var/cache/baton/vllm \
    VLLM_NO_USAGE_STATS=1 \
    NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/baton
# That of vLLM's image would serve with vLLM alone.
ENTRYPOINT []
# A Ray node's command has the address of its head: the chart gives it.
CMD ["baton", "doctor", "--part", "worker"]
