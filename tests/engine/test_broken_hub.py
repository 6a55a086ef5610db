"""An engine whose hub cannot be used serves alone, and says why."""

import shutil
from pathlib import Path

from hack.loopback import free_port
from hack.standalone.engine import Engine
from hack.standalone.pool import Pool
from tests.engine.conftest import Prompts, Reference, Weights, check
from tests.engine.server_nursery import ServerNursery


def test_broken_hub_address_and_key(
    weights: Weights, tmp_path: Path, servers: ServerNursery, prompts: Prompts, reference: Reference
) -> None:
    with Pool(tmp_path) as pool:
        connector = pool.connector(local_bytes=64 << 20)
        wrong = shutil.copytree(pool.credentials, tmp_path / "wrong-fence")
    (wrong / "client.key").write_text("this is not a CURVE key")
    connector["kv_connector_extra_config"]["hub"] = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "credentials_dir": str(wrong)}
    prompt = prompts()
    with Engine("no-hub", weights.base, tmp_path, connector, popen=servers.popen) as engine:
        for _ in range(3):
            answer = engine.complete(prompt)
            check(answer, 0, reference(prompt, weights.base))
        assert engine.metric("vllm:external_prefix_cache_hits_total") == 0
        log = engine.process.log.read_text()
        complaints = [line for line in log.splitlines() if "client.key" in line]
        assert complaints, log[-3000:]
        assert len([line for line in complaints if "EngineCore" in line or "Worker" not in line]) == 1, complaints
