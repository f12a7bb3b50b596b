"""Whisper (Radford et al. 2022): an encoder of mel spectrograms behind two convolutions, and BART's decoder."""

from ...weights.names import Stored
from ..config import HFConfig
from ..seq2seq import bart_like, bart_names
from ..spec import ConvolutionSpec, ModelSpec

NO_BIAS = Stored(name="", zeros=True)
WEIGHTS = bart_names(
    final_norm=True,
    changes={"embed_tokens": Stored(name="model.decoder.embed_tokens", copies=("proj_out",))},
    encoder_changes={
        "convolutions.0": Stored(name="model.encoder.conv1", kernel=3),
        "convolutions.1": Stored(name="model.encoder.conv2", kernel=3),
    },
    tensors={"attn.k_proj.bias": NO_BIAS, "cross.k_proj.bias": NO_BIAS},
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Keys have no bias, unlike queries and values. 30 s of speech are 3000 frames and 1500 positions."""
    config = config.with_defaults(num_mel_bins=80, max_source_positions=1500, max_target_positions=448)
    length = config.size("max_source_positions")
    return bart_like(
        config.replace(max_position_embeddings=config.size("max_target_positions")),
        pre_norm=True,
        final_norm=True,
        lm_head_bias=False,
        encoder={
            "num_features": config.size("num_mel_bins"),
            "convolutions": (ConvolutionSpec(kernel=3), ConvolutionSpec(kernel=3, stride=2)),
            "shares_embedding": False,
            "num_learned_positions": length,
            "max_position_embeddings": length,
        },
    )
