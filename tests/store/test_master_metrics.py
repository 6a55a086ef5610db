"""The series of Mooncake's master that boards ask for, on a real master with a store."""

import re
import urllib.request

from hack.observe.catalog import MOONCAKE
from hack.standalone.mooncake import Mooncake


def test_what_boards_ask_of_the_master_is_served(shared: Mooncake) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{shared.admin_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    values = dict(re.findall(r"^(\w+) ([\d.e+]+)$", text, re.MULTILINE))
    assert {metric.name: metric.kind for metric in MOONCAKE} == {metric.name: types.get(metric.name) for metric in MOONCAKE}
    assert {metric.name for metric in MOONCAKE} <= values.keys()
    assert float(values["master_total_capacity_bytes"]) == 64 << 20
