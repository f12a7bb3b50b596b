"""float8 with a scale for each output, as FBGEMM's kernels take it (Llama 3.1 405B)."""

from .fp8 import check, find, scheme

__all__ = ["check", "find", "scheme"]
