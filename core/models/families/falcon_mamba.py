"""Falcon Mamba: Mamba with weightless norms of step size, b and c."""

from ..config import HFConfig
from ..spec import ModelSpec, NormSpec
from . import mamba

WEIGHTS = mamba.WEIGHTS


def to_spec(config: HFConfig) -> ModelSpec:
    """Mamba with those norms."""
    norm = NormSpec(eps=config.number("mixer_rms_eps", 1e-6), weight=False)
    return mamba.mamba_like(config, norm)
