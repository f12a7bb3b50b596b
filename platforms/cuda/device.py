"""NVIDIA GPUs: what tells them from other vendors' GPUs."""

from ..gpu.device import GpuPlatform, Vendor
from .detect import FIX


class CudaPlatform(GpuPlatform):
    """Opens an NVIDIA GPU, or its emulation with the tuning of an H100."""

    vendor = Vendor(name="cuda", torch_name="cuda", emulated_arch="sm_90", fix=FIX, collectives="nccl")

    def architecture(self, index: int) -> str:
        """sm_ and the compute capability."""
        import torch

        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"
