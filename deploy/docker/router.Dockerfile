# syntax=docker/dockerfile:1.7
# The router, and what gets the model: neither torch nor Ray.
#   docker build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .

# A release adds the digest: --build-arg PYTHON=3.11.11-slim-bookworm@sha256:... A base of your own has Debian 12 and Python
# 3.11.3 or newer in /usr/local: --build-arg PYTHON_IMAGE=registry.example/python --build-arg PYTHON=TAG
ARG PYTHON_IMAGE=python
ARG PYTHON=3.11.11-slim-bookworm

FROM ${PYTHON_IMAGE}:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A mirror of PyPI, and a folder or page with more files. The locks' hashes hold in any case.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /build
RUN python -c "import sys; sys.exit(sys.version_info < (3, 11, 3) and 'the base image needs Python 3.11.3 or newer')" \
    && python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY deploy/docker/locks/ locks/
# First what changes seldom; `make lock` says what that is, file by file.
RUN pip install --only-binary=:all: --no-deps --require-hashes -r locks/router.txt \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --only-binary=:all: --no-deps --require-hashes -r locks/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && pip install --no-deps wheels/*.whl \
    && pip check

FROM ${PYTHON_IMAGE}:${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="baton-router" \
      org.opencontainers.image.description="Router of Baton, a disaggregated serving cluster for large language models" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 1000 baton \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin baton \
    && install -d -o 1000 -g 1000 /etc/baton /var/cache/baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    BATON_CACHE=/var/cache/baton \
    HF_HOME=/var/cache/baton/huggingface
USER 1000:1000
WORKDIR /home/baton
EXPOSE 50051 8000
# Kubernetes has probes of its own; this one is for compose.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-P", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
CMD ["baton", "run", "router"]
