"""The memory that this machine or its container can give."""

from pathlib import Path

import pytest

from epochkv_connector.config import check_fits, memory_limit
from epochkv_fence.connection import ConfigurationError

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, path: str, content: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 5 kB\n")
    return tmp_path


def limit_of(root: Path) -> tuple[int, str]:
    limit = memory_limit(root)
    assert limit is not None
    return limit


def test_a_container_sees_its_own_group_as_the_root(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    assert limit_of(root) == (8 * GIB, "memory.max of its cgroup")
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    assert limit_of(root) == (64 * GIB, "the machine's memory")


def test_version_1_of_groups(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert limit_of(root) == (4 * GIB, "memory.limit_in_bytes of its cgroup")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1)
    assert limit_of(root)[0] == 64 * GIB


def test_garbage_and_nothing_are_no_limit(root: Path, tmp_path: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", "-5 apples")
    assert limit_of(root)[0] == 64 * GIB
    assert memory_limit(tmp_path / "empty") is None
    check_fits(1 << 60, "local.capacity_bytes", 1 << 60, tmp_path / "empty")


def test_what_cannot_exist_is_an_error_with_both_numbers(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", str(8 * GIB))
    check_fits(8 * GIB, "local.capacity_bytes", 8 * GIB, root)
    with pytest.raises(ConfigurationError) as caught:
        check_fits(9 * GIB, "local.capacity_bytes", 18 * GIB, root)
    assert str(caught.value) == (
        f"kv_connector_extra_config: local.capacity_bytes is {18 * GIB}, which takes {9 * GIB} bytes (9.0 GiB) on this machine; "
        f"it must stay below {8 * GIB} bytes (8.0 GiB, memory.max of its cgroup) with room for vLLM; "
        "lower local.capacity_bytes, or raise that limit"
    )
