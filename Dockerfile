# The operator (and the fence hub inside it). Nothing of vLLM, torch or Mooncake is in here.
#   docker build -t epochkv/operator:dev .
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE_IMAGE} AS base
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 ca-certificates \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb

FROM base AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY hack/requirements/build.txt hack/requirements/operator.txt hack/requirements/
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir --require-hashes -r hack/requirements/build.txt \
 && python3 -m venv --without-pip /opt/epochkv \
 && /build/bin/pip --python /opt/epochkv/bin/python install --no-cache-dir --require-hashes -r hack/requirements/operator.txt
COPY pyproject.toml README.md LICENSE ./
COPY fence fence
COPY connector connector
COPY operator operator
RUN /build/bin/pip --python /opt/epochkv/bin/python install --no-cache-dir --no-deps --no-index \
      "$(/build/bin/python -m hatchling build -t wheel -d /tmp/dist >/dev/null && ls /tmp/dist/*.whl)" \
 && rm -rf /opt/epochkv/lib/python3*/site-packages/epochkv_connector

FROM base
COPY --from=build /opt/epochkv /opt/epochkv
ENV PATH=/opt/epochkv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 7700 8080 9090
ENTRYPOINT ["python", "-m", "epochkv_operator"]
CMD ["run"]
