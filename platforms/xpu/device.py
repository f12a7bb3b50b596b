"""Intel GPUs: what tells them from other vendors' GPUs."""

from ..gpu.device import GpuPlatform, Vendor
from .detect import FIX


class XpuPlatform(GpuPlatform):
    """Opens an Intel GPU, or its emulation."""

    vendor = Vendor(name="xpu", torch_name="xpu", emulated_arch="xe", fix=FIX, collectives="xccl")

    def architecture(self, index: int) -> str:
        """All of Intel's GPUs share one tuning."""
        return "xe"
