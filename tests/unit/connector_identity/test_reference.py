"""The page of the configuration's keys: it is up to date, complete, and a page that is not is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from epochkv_connector.config import ConnectorConfig, DistributedTier, LocalTier
from epochkv_connector.config.reference import PAGE, main, markdown
from epochkv_fence.connection import HubRef, PoolRef

ROW = {
    "config_file": ("string", ""),
    "pool": ("object", "required"),
    "pool.namespace": ("string", '`""`'),
    "hub": ("object", ""),
    "hub.credentials_dir": ("string", ""),
    "local.capacity_bytes": ("integer, bytes", "required"),
    "distributed.protocol": ("string", '`"tcp"`'),
    "allow_untested_vllm": ("boolean", "`false`"),
    "lookup_deadline_ms": ("number, milliseconds", "`500.0`"),
    "staging_slots": ("integer, blocks", "`64`"),
}


def rows() -> dict[str, list[str]]:
    lines = [line for line in markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_every_key_has_one_row_with_what_it_does() -> None:
    found = rows()
    for key, row in found.items():
        assert len(row) == 4, key
        assert row[3].endswith("."), key
    models = {"": ConnectorConfig, "pool.": PoolRef, "hub.": HubRef, "local.": LocalTier, "distributed.": DistributedTier}
    assert set(found) == {prefix + name for prefix, model in models.items() for name in model.__struct_fields__}


@pytest.mark.parametrize("key", ROW)
def test_types_units_and_defaults_are_those_of_the_models(key: str) -> None:
    assert tuple(rows()[key][:2]) == ROW[key]


def test_a_page_that_differs_is_noticed_and_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert f"{PAGE} is not what the models say: run python -m epochkv_connector.config.reference" in capsys.readouterr().err
    assert not (tmp_path / PAGE).exists()
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / PAGE).write_text(markdown().replace("500.0", "20.0"))
    assert main(["--check", "--root", str(tmp_path)]) == 1
