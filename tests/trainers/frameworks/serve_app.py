"""A Ray Serve LLM application as a user writes one: two models with the same weights behind Ray's ingress for development.

python -m tests.trainers.frameworks.serve_app SPEC.json
"""

import json
import signal
import sys
import threading
from pathlib import Path

import ray
from ray import serve
from ray.llm._internal.serve.core.ingress.dev_ingress import build_dev_openai_app
from ray.serve.llm import LLMConfig


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    ended = threading.Event()
    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=spec["temporary"])
    serve.start(http_options={"host": "127.0.0.1", "port": spec["port"]})
    configs = [
        LLMConfig(
            model_loading_config={"model_id": name, "model_source": spec["model"]},
            accelerator_config={"kind": "cpu"},
            deployment_config={"num_replicas": 1},
            engine_kwargs=spec["engine_kwargs"],
            runtime_env={"env_vars": spec["environ"]},
        )
        for name in spec["names"]
    ]
    serve.run(build_dev_openai_app({"llm_configs": configs}))
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    Path(spec["ready"]).touch()
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
