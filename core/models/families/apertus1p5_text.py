"""The language model of Apertus 1.5: Apertus, whose head may lack the tokens that stand for images and sounds."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..spec import ModelSpec
from . import apertus

WEIGHTS = apertus.WEIGHTS


def to_spec(config: HFConfig) -> ModelSpec:
    """`output_vocab_size` tokens can be written, the first ones."""
    spec = apertus.to_spec(config)
    written = config.size("output_vocab_size", spec.vocab_size)
    if written > spec.vocab_size:
        raise ModelError(
            f"output_vocab_size ({written}) in {config.file} is more than vocab_size ({spec.vocab_size})"
        )
    return dataclasses.replace(spec, vocab_size=written, num_extra_tokens=spec.vocab_size - written)
