"""Opened Neuron cores for the stock JAX runner; the ops are JAX's plain ones."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from headrace.core.config import EngineConfig
from headrace.core.devices import EMULATED
from headrace.core.ops.jax import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Platform
from headrace.core.runner.jax import JaxDevice, host_devices

from ..tpu.detect import jax_info
from ..tpu.device import pick_devices
from ..tpu.emulated import EmulatedJax, emulated_info
from .detect import PLATFORM


class NeuronDevice(JaxDevice):
    """Cores of one host, one rank of tensor parallelism each."""

    def __init__(self, *, info: DeviceInfo, devices: Sequence[Any], shared_memory: bool = False) -> None:
        caps = Caps(
            array="jax",
            dtypes=("bfloat16", "float32"),
            depth=1,
            capture="compile",
            bucketed=True,
            shared_memory=shared_memory,
            features=FEATURES,
        )
        super().__init__(info=info, caps=caps, devices=devices)

    def describe(self) -> Mapping[str, str]:
        """How many cores, and the version of what drives them."""
        return {"cores": str(self.mesh.size), "jax": jax.__version__}


class EmulatedNeuron(EmulatedJax, NeuronDevice):
    """The same code path on this machine's processor."""


class NeuronPlatform(Platform):
    """Opens cores: neuron (all of the host), neuron:0, neuron:0,1, or neuron:emulated."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open them. Raises DeviceUnavailable."""
        if list(ids) == [EMULATED]:
            return EmulatedNeuron(info=emulated_info(PLATFORM), devices=host_devices()[:1], shared_memory=True)
        devices = pick_devices(PLATFORM, ids)
        return NeuronDevice(info=jax_info(devices[0], PLATFORM), devices=devices)
