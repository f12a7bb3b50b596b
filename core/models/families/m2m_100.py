"""M2M-100 and NLLB (Fan et al. 2020): BART with sinusoids that begin in row 2, and norms before its blocks."""

from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ModelSpec

WEIGHTS = bart_names(final_norm=True)


def to_spec(config: HFConfig) -> ModelSpec:
    """Positions begin behind that of padding."""
    config = config.with_defaults(activation_function="relu", scale_embedding=True, pad_token_id=1)
    first = config.integer("pad_token_id") + 1
    return bart_like(
        config, pre_norm=True, final_norm=True, lm_head_bias=False, sinusoids="halves", first_position=first
    )
