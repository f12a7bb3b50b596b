"""AWS Neuron cores; the ops are JAX's plain ones."""

from ..jax.device import Accelerators, JaxPlatform
from ..jax.emulated import EmulatedJax
from .detect import PLATFORM


class NeuronDevice(Accelerators):
    """Cores of one host."""

    unit = "cores"
    dtypes = ("bfloat16", "float16", "float32")


class EmulatedNeuron(EmulatedJax, NeuronDevice):
    """The same code path on this machine's processor."""


class NeuronPlatform(JaxPlatform):
    """Opens cores: neuron (all of the host), neuron:0, neuron:0,1, or neuron:emulated."""

    name = PLATFORM
    device = NeuronDevice
    emulated = EmulatedNeuron
