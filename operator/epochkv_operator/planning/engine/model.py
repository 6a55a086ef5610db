"""Where an engine finds its model: a repository, a path, a volume with the files, a volume that keeps downloads."""

from __future__ import annotations

from typing import Final

from epochkv_operator.api.engine import InferenceEngineSpec
from epochkv_operator.api.serving import ModelVolume
from epochkv_operator.planning.context import Json

MODELS_DIR: Final = "/models"
CACHE_DIR: Final = "/cache"
MODEL_VOLUME: Final = "model"


def model_path(spec: InferenceEngineSpec) -> str:
    """What vLLM's `--model` says."""
    model = spec.model
    if model.volume is not None:
        return f"{MODELS_DIR}/{model.volume.path}" if model.volume.path else MODELS_DIR
    return model.source or model.name


def model_environment(spec: InferenceEngineSpec) -> dict[str, str]:
    """Defaults, which the user may replace."""
    if spec.model.volume is not None:
        return {"HF_HUB_OFFLINE": "1"}
    return {"HF_HOME": f"{CACHE_DIR}/huggingface"} if spec.model.cache is not None else {}


def model_volumes(spec: InferenceEngineSpec) -> tuple[list[Json], list[Json]]:
    """Volumes of the pod, and their mounts in the engine container."""
    if spec.model.volume is not None:
        volume = {"name": MODEL_VOLUME, **_source(spec.model.volume)}
        return [volume], [{"name": MODEL_VOLUME, "mountPath": MODELS_DIR, "readOnly": True}]
    if spec.model.cache is not None:
        volume = {"name": "model-cache", "persistentVolumeClaim": {"claimName": spec.model.cache.claim_name}}
        return [volume], [{"name": "model-cache", "mountPath": CACHE_DIR}]
    return [], []


def _source(volume: ModelVolume) -> Json:
    if volume.image is not None:
        return {"image": volume.image.model_dump(exclude_none=True)}
    return {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": True}}
