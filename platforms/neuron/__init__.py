"""AWS Neuron chips as a platform, driven by JAX. Only the manifest stands here; see device.py."""

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec


@hookimpl
def headrace_platforms() -> list[PlatformSpec]:
    """The neuron platform; its driver makes /dev/neuron0 and so on."""
    return [
        PlatformSpec(
            name="neuron",
            impl="headrace.platforms.neuron.device:NeuronPlatform",
            detect="headrace.platforms.neuron.detect:detect",
            priority=70,
            fix="AWS's own package index has jax-neuronx; --device neuron:emulated runs its code path here",
            device_nodes=("/dev/neuron[0-9]*",),
        )
    ]
