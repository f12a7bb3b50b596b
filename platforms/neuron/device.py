"""AWS Neuron cores; the ops are JAX's plain ones, but for those that their compiler lacks."""

from collections.abc import Sequence

from headrace.core.platform import OpProvider

from ..jax.device import Accelerators, JaxPlatform
from ..jax.emulated import EmulatedJax
from .detect import PLATFORM
from .ops import provider


class NeuronDevice(Accelerators):
    """Cores of one host."""

    unit = "cores"
    dtypes = ("bfloat16", "float16", "float32")
    assumed_bytes = 12 << 30
    """of a NeuronCore-v3 (8 share 96 GiB), the least that a core has"""

    def providers(self) -> Sequence[OpProvider]:
        """Ops of the platform's own."""
        return (provider(),)


class EmulatedNeuron(EmulatedJax, NeuronDevice):
    """The same code path on this machine's processor."""


class NeuronPlatform(JaxPlatform):
    """Opens cores: neuron (all of the host), neuron:0, neuron:0,1, or neuron:emulated."""

    name = PLATFORM
    device = NeuronDevice
    emulated = EmulatedNeuron
