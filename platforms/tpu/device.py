"""Opened TPU chips for the stock JAX runner."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from headrace.core.config import EngineConfig
from headrace.core.devices import EMULATED
from headrace.core.errors import DeviceUnavailable
from headrace.core.ops.jax import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, OpProvider, Platform
from headrace.core.runner.jax import JaxDevice, host_devices
from headrace.core.weights.source import DTYPE_BYTES

from .detect import PLATFORM, jax_info
from .emulated import EmulatedJax, emulated_info
from .ops import pallas_provider

LANES = 128
"""Values of the last axis that a register holds; memory is padded to it."""
SUBLANE_BYTES = 32
"""Bytes of the axis before it: 8 rows of float32, 16 of bfloat16."""


class TpuDevice(JaxDevice):
    """Chips of one host, one rank of tensor parallelism each."""

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
        """How many chips, and the version of what drives them."""
        return {"chips": str(self.mesh.size), "jax": jax.__version__}


class TpuChips(TpuDevice):
    """Chips whose memory is tiled: the last two axes of an array are padded."""

    def providers(self) -> Sequence[OpProvider]:
        """The Pallas kernels."""
        return [pallas_provider(self.mesh, interpret=False)]

    def block_bytes(self, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
        """Keys and values lie side by side in a row of 2 * head_dim, padded to whole registers."""
        size = DTYPE_BYTES[dtype]
        rows = SUBLANE_BYTES // size
        return num_kv_heads * _round_up(block_size, rows) * _round_up(2 * head_dim, LANES) * size


class EmulatedTpu(EmulatedJax, TpuDevice):
    """The same code path on this machine's processor."""

    def providers(self) -> Sequence[OpProvider]:
        """The Pallas kernels, interpreted."""
        return [pallas_provider(self.mesh, interpret=True)]


class TpuPlatform(Platform):
    """Opens chips: tpu (all of the host), tpu:0, tpu:0,1,2,3, or tpu:emulated."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open them. Raises DeviceUnavailable."""
        if list(ids) == [EMULATED]:
            return EmulatedTpu(info=emulated_info(PLATFORM), devices=host_devices()[:1], shared_memory=True)
        devices = pick_devices(PLATFORM, ids)
        return TpuChips(info=jax_info(devices[0], PLATFORM), devices=devices)


def pick_devices(platform: str, ids: Sequence[str]) -> list[Any]:
    """JAX's devices with these ids, all local ones by default. Raises DeviceUnavailable."""
    try:
        found = {str(device.id): device for device in jax.local_devices(backend=platform)}
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"JAX finds no {platform}: {str(error).splitlines()[0]}",
            remedies=[f"--device {platform}:{EMULATED}", "headrace devices"],
        ) from error
    missing = [i for i in ids if i not in found]
    if missing:
        raise DeviceUnavailable(
            f"there is no {platform}:{missing[0]}; there are {', '.join(f'{platform}:{i}' for i in found)}",
            remedies=[f"--device {platform}", f"--device {platform}:{EMULATED}"],
        )
    return [found[i] for i in ids] if ids else list(found.values())


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
