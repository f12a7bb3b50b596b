"""TPU chips: their Pallas kernels and the way in which their memory is padded."""

from collections.abc import Sequence

from headrace.core.platform import OpProvider
from headrace.core.weights.source import DTYPE_BYTES

from ..jax.device import Accelerators, JaxPlatform
from ..jax.emulated import EmulatedJax
from .detect import PLATFORM
from .ops import pallas_provider

LANES = 128
"""Values of the last axis that a register holds; memory is padded to it."""
SUBLANE_BYTES = 32
"""Bytes of the axis before it: 8 rows of float32, 16 of bfloat16."""


class TpuChips(Accelerators):
    """Chips whose memory is tiled: the last two axes of an array are padded."""

    unit = "chips"

    def providers(self) -> Sequence[OpProvider]:
        """The Pallas kernels."""
        return [pallas_provider(self.mesh, interpret=False)]

    def block_bytes(self, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
        """Keys and values lie side by side in a row of 2 * head_dim, padded to whole registers. Integers have 2 *
        block_size scales for each head, padded on each chip."""
        size = DTYPE_BYTES[dtype]
        rows = SUBLANE_BYTES // size
        values = num_kv_heads * _round_up(block_size, rows) * _round_up(2 * head_dim, LANES) * size
        if dtype != "int8":
            return values
        chips = self.mesh.size if num_kv_heads > 1 else 1
        scales = chips * _round_up(num_kv_heads // chips, SUBLANE_BYTES // 4) * _round_up(2 * block_size, LANES) * 4
        return values + scales


class EmulatedTpu(EmulatedJax, Accelerators):
    """The same code path on this machine's processor."""

    unit = "chips"

    def providers(self) -> Sequence[OpProvider]:
        """The Pallas kernels, interpreted."""
        return [pallas_provider(self.mesh, interpret=True)]


class TpuPlatform(JaxPlatform):
    """Opens chips: tpu (all of the host), tpu:0, tpu:0,1,2,3, or tpu:emulated."""

    name = PLATFORM
    device = TpuChips
    emulated = EmulatedTpu


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
