"""Where the operator listens when nobody says: on every address, of both families."""

import asyncio

import aiohttp
import pytest

from epochkv_operator.control.runtime import Probes
from epochkv_operator.settings import Settings
from hack.loopback import free_ports, has_ipv6


async def answers(probes: Probes, binds: tuple[str, str], urls: list[str]) -> list[int]:
    await probes.serve(*binds)
    try:
        async with aiohttp.ClientSession() as session:
            return [(await session.get(url)).status for url in urls]
    finally:
        await probes.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_probes_and_metrics_are_answered_on_both_families() -> None:
    first, second = free_ports(2)
    binds = Settings.probe_bind.replace("8080", str(first)), Settings.metrics_bind.replace("9090", str(second))
    urls = [f"http://{host}:{where}" for host in ("127.0.0.1", "[::1]") for where in (f"{first}/livez", f"{second}/metrics")]
    assert asyncio.run(answers(Probes(), binds, urls)) == [200] * 4
    binds = f"[::1]:{first}", f"[::1]:{second}"
    assert asyncio.run(answers(Probes(), binds, urls[2:])) == [200] * 2
