"""RecurrentGemma (Griffin): gated linear recurrences, and an attention layer that slides now and then."""

import math
from functools import partial

from ...weights.names import Stored
from ..config import HFConfig, flag, number
from ..hybrids import replace_with_mixers
from ..llama_like import all_slide, llama_like, rms_norm
from ..name_tables import glu, llama_names
from ..spec import MixerSpec, ModelSpec

_AT = "temporal_block."
_LRU = f"{_AT}rg_lru."
WEIGHTS = llama_names(
    {
        "attn_norm": "temporal_pre_norm", "mlp_norm": "channel_pre_norm", "final_norm": "model.final_norm",
        **glu("mlp", "mlp_block"), **{f"attn.{name}_proj": f"{_AT}{name}_proj" for name in "qkvo"},
        "mixer.conv": f"{_AT}conv_1d", "mixer.y_proj": f"{_AT}linear_y", "mixer.x_proj": f"{_AT}linear_x",
        "mixer.out_proj": f"{_AT}linear_out",
    },
    tensors={
        "mixer.rate": f"{_LRU}recurrent_param",
        "mixer.input_gate.weight": Stored(name=f"{_LRU}input_gate_weight", stacked=True),
        "mixer.input_gate.bias": Stored(name=f"{_LRU}input_gate_bias", reshape=True),
        "mixer.decay_gate.weight": Stored(name=f"{_LRU}recurrent_gate_weight", stacked=True),
        "mixer.decay_gate.bias": Stored(name=f"{_LRU}recurrent_gate_bias", reshape=True),
    },
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Kinds of layers are listed once, and repeated. Embeddings grow by a root in bfloat16."""
    config = config.alias(
        sliding_window="attention_window_size", hidden_act="hidden_activation"
    ).with_defaults(
        max_position_embeddings=8192, sliding_window=2048, hidden_act="gelu_pytorch_tanh", partial_rotary_factor=0.5,
        tie_word_embeddings=True, block_types=["recurrent", "recurrent", "attention"],
    )  # fmt: skip
    config = config.replace(head_dim=None, intermediate_size=config.size("intermediate_size") // 2)
    kinds, root = config.texts("block_types"), math.sqrt(config.size("hidden_size"))
    step = 2.0 ** (math.frexp(root)[1] - 8)
    spec = llama_like(
        config,
        layer_types=all_slide,
        norm=partial(rms_norm, plus_one=True),
        qkv_bias=flag("attention_bias"),
        mlp_bias=True,
        attn={"o_bias": True},
        embed_scale=round(root / step) * step,
        logit_softcap=number("logits_soft_cap", 30.0, null=0.0),
    )
    mixer = MixerSpec(
        kind="lru",
        num_heads=config.size("lru_width", spec.hidden_size),
        head_dim=1,
        conv_width=config.size("conv1d_width", 4),
        activation=spec.layers[0].mlp.activation,
        num_blocks=config.size("num_attention_heads"),
        state_size=1,
        bias=True,
        out_bias=True,
    )
    return replace_with_mixers(spec, mixer, [kinds[i % len(kinds)] == "recurrent" for i in range(spec.num_layers)])
