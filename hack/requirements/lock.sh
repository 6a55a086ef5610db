#!/usr/bin/env bash
# Compile the pinned environments. Hashes, but no index addresses: any mirror may serve them.
#   dev     operator, fence, tools: everything that needs neither torch nor vLLM
#   engine  dev + vLLM on CPU + the connector
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=${UV:-uv}
common=(--python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make lock" --quiet)
"$uv" pip compile pyproject.toml "${common[@]}" --extra operator --group dev -o hack/requirements/dev.txt "$@"
"$uv" pip compile pyproject.toml "${common[@]}" --extra operator --extra connector --group dev --group engine \
  --override hack/requirements/overrides.txt -o hack/requirements/engine.txt "$@"
# A trainer, the connector and a vLLM on CPU that the trainer takes. Pins of the engine environment are kept where they fit, so wheels are shared.
# NAME.overrides, if there is one, takes precedence over what the trainer asks for.
for asks in hack/requirements/trainers/*.in; do
  [ -f "$asks" ] || continue
  cp hack/requirements/engine.txt "${asks%.in}.txt"
  more=()
  [ ! -f "${asks%.in}.overrides" ] || more=(--override "${asks%.in}.overrides")
  "$uv" pip compile pyproject.toml "$asks" "${common[@]}" --extra connector --extra trainer --group dev \
    --override hack/requirements/overrides.txt "${more[@]}" -o "${asks%.in}.txt"
done
for name in build operator store connector docs sbom; do
  [ -f "hack/requirements/$name.in" ] || continue
  more=()
  [ "$name" != connector ] || more=(--no-deps) # vLLM brings what Mooncake asks for
  "$uv" pip compile "hack/requirements/$name.in" "${common[@]}" "${more[@]}" -o "hack/requirements/$name.txt" "$@"
done
