# A vLLM image with the EpochKV connector and the Mooncake client. Two targets:
#
#   engine          the one to deploy: a vLLM image of your choice plus the connector
#                     docker build -f docker/engine.Dockerfile --target engine --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 -t epochkv/engine:dev .
#   engine-hostenv  for clusters on one machine: the interpreter and the connector; vLLM (6 GB) comes from a volume at /venv
#                     docker build -f docker/engine.Dockerfile --target engine-hostenv -t epochkv/engine:dev .
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${BASE_IMAGE} AS base
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3 ca-certificates ibverbs-providers libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2 libgomp1 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb

FROM base AS wheel
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY hack/requirements/build.txt hack/requirements/
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir --require-hashes -r hack/requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY fence fence
COPY connector connector
COPY operator operator
RUN /build/bin/python -m hatchling build -t wheel -d /dist \
 && /build/bin/pip install --no-cache-dir --no-deps --no-index --target /opt/epochkv /dist/*.whl \
 && rm -rf /opt/epochkv/epochkv_operator

FROM base AS engine-hostenv
COPY --from=wheel /opt/epochkv /opt/epochkv
RUN ln -s /usr/bin/python3 /usr/local/bin/python
# The image's own interpreter runs the packages of the mounted environment; the connector of this image comes first.
# There is no compiler in here: without the two switches a request for logprobs would end the engine.
ENV PYTHONPATH=/opt/epochkv:/venv/lib/python3.11/site-packages \
    PATH=/usr/local/bin:/usr/bin:/bin:/venv/bin \
    TORCH_COMPILE_DISABLE=1 TORCHDYNAMO_DISABLE=1 \
    HOME=/tmp PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8000
CMD ["python", "-m", "vllm.entrypoints.openai.api_server", "--help"]

FROM ${VLLM_IMAGE} AS engine
USER root
RUN if command -v apt-get >/dev/null; then apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ibverbs-providers libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2 && rm -rf /var/lib/apt/lists/*; fi
COPY --from=wheel /dist /dist
# Only what the vLLM image lacks is installed; what it has keeps its version.
RUN wheel="$(ls /dist/*.whl)" \
 && if command -v uv >/dev/null; then uv pip install --system --no-cache "${wheel}[connector]"; \
    else python3 -m pip install --no-cache-dir "${wheel}[connector]"; fi \
 && rm -rf /dist
ENV HOME=/tmp
USER 65532:65532
EXPOSE 8000
