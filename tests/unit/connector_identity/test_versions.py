"""What an engine tells its hub of the packages that it runs."""

import importlib.metadata

import vllm

from epochkv_connector.engine.interface import running


def test_the_versions_are_those_of_the_installed_packages() -> None:
    names = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    mooncake = {version for name, version in names.items() if name.startswith("mooncake-transfer-engine")}
    assert running() == {"epochkv": names["epochkv"], "vllm": vllm.__version__, "mooncake": mooncake.pop()}
