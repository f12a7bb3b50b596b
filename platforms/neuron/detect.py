"""Asks JAX's Neuron plugin for the cores of this host. Runs in a child process."""

from headrace.core.platform import Probe

from ..jax.probe import probe_jax

PLATFORM = "neuron"
"""What JAX calls it."""


def detect() -> Probe:
    """The cores that JAX finds."""
    fix = "install jax-neuronx from AWS's own package index"
    return probe_jax(PLATFORM, "libneuronxla", what="Neuron core", fix=fix)
