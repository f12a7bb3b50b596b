"""Kernels in plain torch operations, for devices that want static shapes or whose host may not be asked."""
