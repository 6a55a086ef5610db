# A vLLM image with the EpochKV connector and the Mooncake client, and what brings both into a vLLM image that has neither. Targets:
#
#   engine          the one to deploy: a vLLM image of your choice plus the connector
#                     docker build -f docker/engine.Dockerfile --target engine --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 -t epochkv/engine:dev .
#   engine-hostenv  for clusters on one machine: the interpreter and the connector; vLLM (6 GB) comes from a volume at /venv
#                     docker build -f docker/engine.Dockerfile --target engine-hostenv -t epochkv/engine:dev .
#   connector       the init container of pods that join a pool by their label: it copies the connector into a volume
#                     docker build -f docker/engine.Dockerfile --target connector -t epochkv/connector:dev .
#   vllm-hostenv    for tests: vLLM from the volume, as an image that has never heard of EpochKV
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

FROM base AS vllm-hostenv
# In the image's own site folder, as where vLLM was installed by pip. Of the environment on the volume, all but EpochKV and Mooncake is shown.
RUN ln -s /usr/bin/python3 /usr/local/bin/python \
 && printf '%s\n' 'import os, sys; sys.path.append("/tmp/site"); os.path.isdir("/tmp/site") or (os.mkdir("/tmp/site"), [os.symlink(e.path, "/tmp/site/" + e.name) for e in os.scandir("/venv/lib/python3.11/site-packages") if not any(n in e.name for n in ("epochkv", "mooncake", "xxhash"))])' \
      > /usr/lib/python3/dist-packages/vllm.pth
ENV PATH=/usr/local/bin:/usr/bin:/bin TORCH_COMPILE_DISABLE=1 TORCHDYNAMO_DISABLE=1 HOME=/tmp PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8000
CMD ["python", "-m", "vllm.entrypoints.openai.api_server", "--help"]

FROM wheel AS bundle
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends patchelf \
 && rm -rf /var/lib/apt/lists/*
COPY hack/requirements/connector.txt hack/requirements/
# For each Python of vLLM's images what vLLM does not bring; most files are the same in all of them. Of Mooncake, the client alone.
RUN for python in 3.11 3.12 3.13; do \
      tag=cp$(echo $python | tr -d .); \
      /build/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary=:all: --python-version $python --implementation cp \
        --abi $tag --platform manylinux_2_28_$(uname -m) --target /opt/epochkv/$tag -r hack/requirements/connector.txt || exit 1; \
      rm -rf /opt/epochkv/$tag/bin /opt/epochkv/$tag/mooncake/transfer_engine_bench /opt/epochkv/$tag/mooncake/mooncake_master \
        /opt/epochkv/$tag/mooncake/mooncake_client; \
    done \
 && hardlink -q -t /opt/epochkv
# Libraries that Mooncake wants of the system, for images that lack some of them (epochkv_connector/engine/entry.py).
RUN mkdir /opt/epochkv/lib \
 && ldd /opt/epochkv/cp311/mooncake/store.so | awk '$3 ~ "^/(usr/)?lib/" {print $3}' \
      | grep -vE '/(libc|libm|libpthread|libdl|librt|libresolv|libgcc_s|libstdc\+\+)\.so' | xargs -I{} cp -L {} /opt/epochkv/lib/ \
 && patchelf --set-rpath '$ORIGIN' /opt/epochkv/lib/*
# As an archive: layers of images would not keep the hard links. Without the folder itself, which is a volume when it is unpacked.
RUN cd /opt/epochkv && tar --owner=0 --group=0 --numeric-owner -cf /opt/epochkv.tar *

FROM ${BASE_IMAGE} AS connector
COPY --from=bundle /opt/epochkv.tar /opt/epochkv.tar
USER 65532:65532
CMD ["sh", "-c", "tar -C /epochkv -xf /opt/epochkv.tar --no-same-owner && echo 'EpochKV: the connector is there; engines of vLLM 0.30 to 0.33 that start in this pod join its pool'"]

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
