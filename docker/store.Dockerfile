# Mooncake master and store, one image. The version is that of the connector's client: a skew between them is silent.
#   docker build -f docker/store.Dockerfile -t epochkv/store:dev .
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE_IMAGE} AS base
# ibverbs-providers brings libmlx5, which the wheel loads also where only TCP is used.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3 ca-certificates ibverbs-providers libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb

FROM base AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY hack/requirements/build.txt hack/requirements/store.txt hack/requirements/
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir --require-hashes -r hack/requirements/build.txt \
 && python3 -m venv --without-pip /opt/mooncake \
 && /build/bin/pip --python /opt/mooncake/bin/python install --no-cache-dir --require-hashes -r hack/requirements/store.txt \
 && rm -f /opt/mooncake/lib/python3*/site-packages/mooncake/transfer_engine_bench

FROM base
COPY --from=build /opt/mooncake /opt/mooncake
# The store service on memory that has its pages before it is mounted; needs nothing else of the connector.
COPY connector/epochkv_connector/__init__.py connector/epochkv_connector/storenode.py /opt/epochkv/epochkv_connector/
ENV PYTHONPATH=/opt/epochkv PATH=/opt/mooncake/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 50051 9003 8088 9300
CMD any=0.0.0.0; read -r _ 2>/dev/null </proc/net/if_inet6 && any=::; \
    exec mooncake_master --rpc_address=$any --rpc_port=50051 --metrics_host=$any --metrics_port=9003 --logtostderr=true
