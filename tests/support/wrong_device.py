"""A device on which one op is wrong, for tests of what finds it."""

from collections.abc import Callable
from typing import Any

from headrace.core.config import KV_DTYPES, DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.ops import OpTable
from headrace.core.ops.table import FAMILIES
from headrace.core.platform import Device, OpProvider
from headrace.core.plugin_loader import Plugins
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject

Op = Callable[..., Any]


def open_on(plugins: Plugins, name: str) -> Device:
    """A device by name, on one thread."""
    return open_device(EngineConfig(device=DeviceConfig(device=name, threads=1)), plugins)


class WrongDevice(Device):
    """The reference with one op replaced."""

    def __init__(self, inner: Device, op: str, wrong: Op) -> None:
        self.inner, self.info, self.caps, self.torch_device = inner, inner.info, inner.caps, "cpu"
        family = next((ops for ops in FAMILIES.values() if op in ops), ())
        self.ops = {name: getattr(OpTable, name) for name in family} | {op: wrong}

    def runner(self, config: Any) -> Any:
        """One whose table has the wrong op."""
        self.inner.extra_providers = (OpProvider(name="wrong", ops=self.ops, kv_dtypes=KV_DTYPES),)
        return self.inner.runner(config)

    def memory(self) -> Any:
        """The reference's."""
        return self.inner.memory()


def must_fail(name: str, device: Device, plugins: Plugins, words: str) -> None:
    """The check finds something, and says so in these words."""
    result = run_check(all_checks()[name], Subject(device, plugins))
    assert (result.outcome, words in result.detail) == ("failed", True), result
