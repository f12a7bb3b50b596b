"""A GPU under torch with Triton's kernels, or the same code under Triton's interpreter on this processor."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.devices import EMULATED, EMULATED_KV_BYTES, rank_devices
from headrace.core.errors import DeviceUnavailable
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Memory, OpProvider, Platform, RunnerConfig
from headrace.core.runner.torch import TorchDevice, TorchRunner
from headrace.core.weights.quantize import Scheme

from ..cpu.memory import host_memory
from .packing import SCHEMES, packed_bytes
from .provider import Libraries, gpu_providers
from .runner import GpuRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """What tells one vendor's GPUs from another's.

    name: the platform. torch_name: what torch calls the device type. emulated_arch: the architecture whose tuning
    the emulated device uses. reserve_bytes: what the driver and the libraries take later.
    collectives: torch.distributed's name of the vendor's library. libraries: op providers beside Triton's kernels.
    """

    name: str
    torch_name: str
    emulated_arch: str
    fix: str
    collectives: str
    reserve_bytes: int = 512 << 20
    libraries: Libraries | None = None


class GpuPlatform(Platform):
    """Opens GPUs by their indices, or the emulated device. Subclasses say which vendor's."""

    vendor: Vendor

    def architecture(self, index: int) -> str:
        """The architecture of a GPU, as kernels/triton/tuning.py names it."""
        raise NotImplementedError

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it. Raises DeviceUnavailable."""
        vendor = self.vendor
        ranks = rank_devices(vendor.name, ids, config)
        if list(ids) == [EMULATED]:
            return _open_emulated(vendor, ranks)
        if not all(text.isdecimal() for text in ids):
            raise DeviceUnavailable(
                f"device {vendor.name} takes indices, got {','.join(ids)}",
                remedies=[f"--device {vendor.name}:0", f"--device {vendor.name}:{EMULATED}"],
            )
        index, last = (int(ids[0]), max(map(int, ids))) if ids else (0, max(1, len(ranks)) - 1)
        import torch

        module = getattr(torch, vendor.torch_name)
        if not module.is_available() or last >= module.device_count():
            found = module.device_count() if module.is_available() else 0
            raise DeviceUnavailable(
                f"torch {torch.__version__} sees {found} {vendor.name} devices, so there is no {vendor.name}:{last}",
                remedies=[vendor.fix, "headrace devices"],
            )
        module.set_device(index)
        settle_torch()
        free, total = device_memory(module, index)
        info = DeviceInfo(
            id=f"{vendor.name}:{','.join(ids) or index}",
            name=module.get_device_name(index),
            kind="gpu",
            total_bytes=total,
            free_bytes=free,
            arch=self.architecture(index),
        )
        return GpuDevice(vendor, info, torch_device=f"{vendor.torch_name}:{index}", ranks=ranks)


class GpuDevice(TorchDevice):
    """One GPU. Emulated, it has the tensors of the host and Triton's interpreter."""

    def __init__(self, vendor: Vendor, info: DeviceInfo, *, torch_device: str, ranks: Sequence[str] = ()) -> None:
        self.vendor = vendor
        self.ranks = ranks
        self.is_emulated = torch_device == "cpu"
        dtypes = ("float32", "float16", "bfloat16") if self.is_emulated else ("bfloat16", "float16", "float32")
        caps = Caps(
            dtypes=dtypes,
            kv_dtypes=KV_DTYPES,
            schemes=SCHEMES,
            packs_experts=True,
            depth=1,
            capture="graph",
            shared_memory=self.is_emulated,
            auto_kv_bytes=EMULATED_KV_BYTES if self.is_emulated else 0,
            features=frozenset(FEATURES),
        )
        super().__init__(info=info, caps=caps, torch_device=torch_device)
        self.collectives = "gloo" if self.is_emulated else vendor.collectives
        self._providers, self._about = gpu_providers(
            info.arch, torch_device=torch_device, interpreted=self.is_emulated, libraries=vendor.libraries
        )

    def own_runner(self, config: RunnerConfig) -> TorchRunner:
        """A runner that records decodes; foreign code is not recorded."""
        if config.spec.foreign is not None:
            return super().own_runner(config)
        return GpuRunner(config, self, None if self.is_emulated else self.module)

    def providers(self) -> Sequence[OpProvider]:
        """Triton's kernels and the vendor's libraries; the definitions, and so torch's products, serve the rest."""
        return self._providers

    def packed_bytes(self, shape: tuple[int, ...], format: str | Scheme) -> int:
        """Bytes of a weight, to the byte."""
        return super().packed_bytes(shape, format) if isinstance(format, str) else packed_bytes(shape, format)

    def activate(self) -> None:
        """Triton launches on the current device, which belongs to a thread, and another model may have changed it."""
        if not self.is_emulated:
            self.module.set_device(self.torch_device)

    def memory(self) -> Memory:
        """What the driver says, less a reserve. What torch's allocator holds but does not use counts as free."""
        if self.is_emulated:
            return host_memory()
        module = self.module
        free, total = device_memory(module, self.torch_device)
        idle = module.memory_reserved(self.torch_device) - module.memory_allocated(self.torch_device)
        free = max(0, free + idle - self.vendor.reserve_bytes)
        return Memory(total_bytes=total, free_bytes=free, used_bytes=total - free)

    @property
    def module(self) -> Any:
        """torch's module for this type of device."""
        import torch

        return getattr(torch, self.vendor.torch_name)

    def describe(self) -> Mapping[str, str]:
        """The architecture, the tuning of the kernels and how they run."""
        ranks = {"ranks": f"{self.tp_size} by {self.collectives}"} if self.ranks else {}
        return {"arch": self.info.arch, **self._about, **ranks}


def settle_torch() -> None:
    """Have torch multiply float32 as such and add the parts of a product in float32, whatever its defaults are here:
    vendors' container images turn on TF32, and sums over parts of 16-bit products are 16-bit by default. And keep its
    fused attention from cuDNN, which torch 2.13 takes first on sm_90 and sm_100: that plans for tens of milliseconds
    on the host at every length of a prompt that it has not met."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def device_memory(module: Any, device: Any) -> tuple[int, int]:
    """(free, total) bytes by torch's module of a GPU. Intel's driver does not tell what is free on every GPU: there,
    what this process has not taken."""
    try:
        free, total = module.mem_get_info(device)
    except RuntimeError:
        total = module.get_device_properties(device).total_memory
        free = total - module.memory_reserved(device)
    return int(free), int(total)


def _open_emulated(vendor: Vendor, ranks: Sequence[str]) -> GpuDevice:
    if find_spec("triton") is None:
        raise DeviceUnavailable(
            f"device {vendor.name}:{EMULATED} runs Triton's interpreter, and the package triton is not installed",
            remedies=["pip install triton"],
        )
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise DeviceUnavailable(
            f"device {vendor.name}:{EMULATED} needs Triton's interpreter, and this process has loaded its compiler",
            remedies=["TRITON_INTERPRET=1 in the environment"],
        )
    # Triton reads it when it is imported and when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1"
    memory = host_memory()
    info = DeviceInfo(
        id=f"{vendor.name}:{EMULATED}",
        name=f"{vendor.emulated_arch} under Triton's interpreter",
        kind="gpu",
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        arch=vendor.emulated_arch,
    )
    return GpuDevice(vendor, info, torch_device="cpu", ranks=ranks)
