"""AMD GPUs: what tells them from other vendors' GPUs. torch calls their device type cuda."""

from ..gpu.device import GpuPlatform, Vendor
from .detect import FIX


class RocmPlatform(GpuPlatform):
    """Opens an AMD GPU, or its emulation with the tuning of an MI300."""

    vendor = Vendor(name="rocm", torch_name="cuda", emulated_arch="gfx942", fix=FIX, collectives="nccl")

    def architecture(self, index: int) -> str:
        """The gfx name without its features."""
        import torch

        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
