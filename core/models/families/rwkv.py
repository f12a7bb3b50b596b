"""RWKV-4: a weighted mean of values in the place of attention, and blocks that see the token before."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import mixers_alone
from ..llama_like import layer_norm
from ..name_tables import name_table
from ..spec import MixerSpec, ModelSpec

_ATTENTION, _MLP = "attention.", "feed_forward."
WEIGHTS = name_table(
    {
        "embed_tokens": "rwkv.embeddings", "final_norm": "rwkv.ln_out", "lm_head": "head",
        "embed_norm": "rwkv.blocks.0.pre_ln", "attn_norm": "ln1", "mlp_norm": "ln2",
        "mixer.k_proj": f"{_ATTENTION}key", "mixer.v_proj": f"{_ATTENTION}value",
        "mixer.gate_proj": f"{_ATTENTION}receptance", "mixer.out_proj": f"{_ATTENTION}output",
        "mlp.up_proj": f"{_MLP}key", "mlp.gate_proj": f"{_MLP}receptance", "mlp.down_proj": f"{_MLP}value",
    },
    layer="rwkv.blocks.{i}.",
    tensors={
        "mixer.a_log": f"{_ATTENTION}time_decay", "mixer.bonus": f"{_ATTENTION}time_first",
        **{
            f"{block}.{ours}_mix": Stored(name=f"{at}time_mix_{theirs}", reshape=True)
            for block, at in (("mixer", _ATTENTION), ("mlp", _MLP))
            for ours, theirs in (("k", "key"), ("v", "value"), ("gate", "receptance"))
        },
    },
    base_prefix="rwkv.",
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Every `rescale_every` layers the stream is halved, and what later layers add to it besides."""
    config = config.with_defaults(context_length=1024, vocab_size=50277, rescale_every=6)
    hidden_size, every = config.size("hidden_size"), config.get("rescale_every")
    every = config.integer("rescale_every") if every and every > 0 else config.num_layers() + 1
    spec = mixers_alone(
        config.replace(max_position_embeddings=config.size("context_length")).with_defaults(
            tie_word_embeddings=False
        ),
        MixerSpec(
            kind="wkv",
            num_heads=config.size("attention_hidden_size", hidden_size),
            head_dim=1,
            shift_size=hidden_size,
            mlp_size=config.size("intermediate_size", 4 * hidden_size),
        ),
    )
    layers = tuple(
        dataclasses.replace(
            layer,
            mixer=layer.mixer and dataclasses.replace(layer.mixer, out_scale=0.5 ** (i // every)),
            stream_scale=1.0 if (i + 1) % every else 0.5,
        )
        for i, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(spec, layers=layers, norm=layer_norm(config, "layer_norm_epsilon"), embed_norm=True)
