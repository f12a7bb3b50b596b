"""Asks JAX's Neuron plugin for the cores of this host. Runs in a child process."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from importlib.util import find_spec

from headrace.core.platform import Probe, Status

from ..tpu.detect import jax_info

PLATFORM = "neuron"
"""What JAX calls it."""


def detect() -> Probe:
    """The cores that JAX finds."""
    for package in ("jax", "libneuronxla"):
        if find_spec(package) is None:
            return Probe(
                status=Status.MISSING,
                reason=f"the package {package} is not installed",
                fix="install jax-neuronx from AWS's own package index",
            )
    import jax

    jax.config.update("jax_platforms", PLATFORM)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Probe(status=Status.NO_DEVICE, reason=f"JAX finds no Neuron core: {str(error).splitlines()[0]}")
    return Probe(status=Status.OK, devices=tuple(jax_info(device, PLATFORM) for device in devices))
