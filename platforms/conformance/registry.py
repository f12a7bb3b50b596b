"""The list of checks, and what a check is given: a device under test and the reference it is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable
from headrace.core.platform import Device, Runner, RunnerConfig
from headrace.core.plugin_loader import Plugins
from headrace.core.self_test import Weights, dummy_weights, load_runner, place_of, tiny_config, tiny_spec

DTYPES = ("float32", "float16", "bfloat16")


class Failed(Exception):
    """A check's finding: what was expected, and what came."""


class NotSupported(Exception):
    """The device said beforehand that it cannot do what the check needs."""


def need_definitions() -> None:
    """Raise NotSupported if there is nothing to compare with: the definitions of the ops need torch."""
    if find_spec("torch") is None:
        raise NotSupported("compares with the definitions, which need torch: pip install 'headrace[torch]'")


class Subject:
    """The device under test. Runners that it opens are closed with it."""

    def __init__(self, device: Device, plugins: Plugins) -> None:
        self.device = device
        self.place = place_of(device)
        self.plugins = plugins
        self._ops: dict[tuple[str, str, int], OpTable] = {}
        self._runners: list[Runner] = []

    @cached_property
    def reference(self) -> Device:
        """The device that holds the definitions. It leaves the number of torch's threads, which both share.

        Raises NotSupported without torch.
        """
        need_definitions()
        import torch

        config = EngineConfig(device=DeviceConfig(device="reference", threads=torch.get_num_threads()))
        return open_device(config, self.plugins)

    @property
    def block_size(self) -> int:
        """A block size that the device takes."""
        sizes = self.device.caps.block_sizes
        return 16 if not sizes or 16 in sizes else sizes[0]

    def need(self, *, dtype: str = "float32", feature: str = "") -> None:
        """Raise NotSupported if the device's capabilities lack a dtype or a feature."""
        if dtype not in self.device.caps.dtypes:
            raise NotSupported(f"the device has no {dtype}")
        if feature and feature not in self.device.caps.features:
            raise NotSupported(f"the device has no {feature}")

    def ops(self, dtype: str, *, kv_dtype: str = "", block_size: int = 0) -> OpTable:
        """The ops that a model in `dtype` would run on. Raises NotSupported if there is no table of ops."""
        self.need(dtype=dtype)
        key = dtype, kv_dtype, block_size or self.block_size
        if key not in self._ops:
            config = tiny_config(tiny_spec(), dtype=dtype, block_size=key[2])
            runner = self.device.runner(replace(config, kv_dtype=kv_dtype))
            self._runners.append(runner)
            if runner.ops is None:
                raise NotSupported("its runner brings everything itself; there is no table of ops")
            self._ops[key] = runner.ops
        return self._ops[key]

    def runner(
        self, spec: ModelSpec, *, dtype: str = "float32", params: Weights = dummy_weights, **fields: Any
    ) -> tuple[Runner, RunnerConfig]:
        """A loaded runner of the device. params: where its weights come from. fields: of its config, beside those of
        `tiny_config`."""
        self.need(dtype=dtype)
        return self._load(self.device, spec, dtype, params, fields)

    def reference_runner(
        self, spec: ModelSpec, *, dtype: str = "float32", params: Weights = dummy_weights, **fields: Any
    ) -> tuple[Runner, RunnerConfig]:
        """A runner of the reference with the same weights."""
        return self._load(self.reference, spec, dtype, params, fields)

    def release(self) -> None:
        """Close the runners; called after each check."""
        for runner in self._runners:
            runner.close()
        self._runners.clear()
        self._ops.clear()

    def keep(self, runner: Runner) -> Runner:
        """The runner, which is closed behind the check."""
        self._runners.append(runner)
        return runner

    def _load(
        self, device: Device, spec: ModelSpec, dtype: str, params: Weights, fields: Mapping[str, Any]
    ) -> tuple[Runner, RunnerConfig]:
        config = replace(tiny_config(spec, dtype=dtype, block_size=self.block_size), **fields)
        return self.keep(load_runner(device, config, params=params)), config


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """One check. run returns a detail, or raises Failed or NotSupported; meaning is one line for the docs."""

    name: str
    meaning: str
    run: Callable[[Subject], str]


CHECKS: dict[str, CheckSpec] = {}
"""Every check by name, in the order in which they run."""


def add_check(name: str, meaning: str, run: Callable[[Subject], str]) -> None:
    """Add a check to the list."""
    assert name not in CHECKS, name
    CHECKS[name] = CheckSpec(name=name, meaning=meaning, run=run)


def check(name: str) -> Callable[[Callable[[Subject], str]], Callable[[Subject], str]]:
    """Add the decorated function; the first line of its docstring is the meaning."""

    def add(run: Callable[[Subject], str]) -> Callable[[Subject], str]:
        add_check(name, (run.__doc__ or "").strip().splitlines()[0], run)
        return run

    return add
