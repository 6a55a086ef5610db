"""The objects of an InferenceEngine: vLLM pods with the connector of their pool, and what belongs around them."""

from epochkv_operator.planning.engine.model import MODEL_VOLUME
from epochkv_operator.planning.engine.objects import desired_engine, leader_selector, workload_of
from epochkv_operator.planning.engine.pod import local_bytes

__all__ = ["MODEL_VOLUME", "desired_engine", "leader_selector", "local_bytes", "workload_of"]
