"""Devices that JAX opens, for the stock JAX runner: what TPU chips and Neuron cores have in common."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.devices import EMULATED, EMULATED_KV_BYTES
from headrace.core.errors import DeviceUnavailable
from headrace.core.ops.jax import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Platform
from headrace.core.runner.jax import JaxDevice, host_devices

from .emulated import emulated_info
from .probe import jax_info


class Accelerators(JaxDevice):
    """Accelerators of one host, one rank of tensor parallelism each. unit: what one of them is called."""

    unit: ClassVar[str] = "devices"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def __init__(self, *, info: DeviceInfo, devices: Sequence[Any], shared_memory: bool = False) -> None:
        caps = Caps(
            array="jax",
            dtypes=self.dtypes,
            kv_dtypes=KV_DTYPES,
            depth=1,
            capture="compile",
            bucketed=True,
            shared_memory=shared_memory,
            auto_kv_bytes=EMULATED_KV_BYTES if shared_memory else 0,
            features=FEATURES,
        )
        super().__init__(info=info, caps=caps, devices=devices)

    def describe(self) -> Mapping[str, str]:
        """How many there are, and the version of what drives them."""
        return {self.unit: str(self.mesh.size), "jax": jax.__version__}


class JaxPlatform(Platform):
    """Opens accelerators: all of the host, by ids such as 0,1,2,3, or emulated.

    name: what JAX and headrace call the platform. device, emulated: the classes of what is opened.
    """

    name: ClassVar[str]
    device: ClassVar[type[Accelerators]]
    emulated: ClassVar[type[Accelerators]]

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open them. Raises DeviceUnavailable."""
        if list(ids) == [EMULATED]:
            return self.emulated(info=emulated_info(self.name), devices=host_devices()[:1], shared_memory=True)
        picked = _pick_devices(self.name, ids)
        index, first = next(iter(picked.items()))
        return self.device(info=jax_info(first, self.name, index), devices=list(picked.values()))


def _pick_devices(platform: str, ids: Sequence[str]) -> dict[int, Any]:
    """JAX's devices of this host by index, those that `ids` name or all. Raises DeviceUnavailable."""
    try:
        found = dict(enumerate(jax.local_devices(backend=platform)))
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"JAX finds no {platform}: {str(error).splitlines()[0]}",
            remedies=[f"--device {platform}:{EMULATED}", "headrace devices"],
        ) from error
    missing = [i for i in ids if not i.isdecimal() or int(i) not in found]
    if missing:
        raise DeviceUnavailable(
            f"there is no {platform}:{missing[0]}; there are {', '.join(f'{platform}:{i}' for i in found)}",
            remedies=[f"--device {platform}", f"--device {platform}:{EMULATED}"],
        )
    return {int(i): found[int(i)] for i in ids} if ids else found
