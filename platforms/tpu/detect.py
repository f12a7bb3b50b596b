"""Asks JAX for the chips of this host. Runs in a child process, because libtpu lets one process have them."""

from headrace.core.platform import Probe

from ..jax.probe import probe_jax

PLATFORM = "tpu"
"""What JAX calls it."""


def detect() -> Probe:
    """The chips that JAX finds."""
    return probe_jax(PLATFORM, "libtpu", what="TPU", fix="pip install 'headrace[tpu]'")
