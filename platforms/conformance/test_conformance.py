"""The conformance kit under pytest.

`pytest -p headrace.platforms.conformance.options --pyargs headrace.platforms.conformance --device X`
"""

from collections.abc import Iterator

import pytest

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.plugin_loader import load_plugins
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject


@pytest.fixture(scope="module")
def subject(pytestconfig: pytest.Config) -> Iterator[Subject]:
    """The device that --device names, opened once."""
    plugins = load_plugins()
    name = str(pytestconfig.getoption("--device"))
    device = open_device(EngineConfig(device=DeviceConfig(device=name)), plugins)
    yield Subject(device, plugins)
    device.close()


@pytest.mark.parametrize("name", all_checks())
def test_conformance(name: str, subject: Subject) -> None:
    """One check of the kit; unsupported is a skip."""
    result = run_check(all_checks()[name], subject)
    if result.outcome == "unsupported":
        pytest.skip(result.detail)
    assert result.outcome == "passed", result.detail
