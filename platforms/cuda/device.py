"""NVIDIA GPUs: what tells them from other vendors' GPUs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.errors import DeviceUnavailable
from headrace.core.platform import OpProvider

from ..gpu.device import GpuPlatform, Vendor
from .detect import FIX, is_too_old, too_old

if TYPE_CHECKING:
    from headrace.kernels.triton.ops import TritonOps


def _libraries(triton: OpProvider, kernels: "TritonOps", arch: str) -> Sequence[OpProvider]:
    from .libraries import library_providers

    return library_providers(triton, kernels, arch)


class CudaPlatform(GpuPlatform):
    """Opens an NVIDIA GPU, or its emulation with the tuning of an H100."""

    vendor = Vendor(
        name="cuda",
        torch_name="cuda",
        emulated_arch="sm_90",
        fix=FIX,
        collectives="nccl",
        libraries=_libraries,
    )

    def architecture(self, index: int) -> str:
        """sm_ and the compute capability. Raises DeviceUnavailable for a GPU that is too old."""
        import torch

        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
        if is_too_old(arch):
            raise DeviceUnavailable(f"cuda:{index} is {too_old(arch)}", remedies=["headrace devices"])
        return arch
