"""What models with recurrences share: mixers read from a config, and the layers that have them."""

import math
from collections.abc import Mapping

from ..errors import ModelError
from ..weights.names import Stored
from .config import HFConfig
from .llama_like import read_activation
from .spec import Activation, LayerSpec, MixerSpec, ModelSpec, NormSpec

RECURRENT = ("linear_attention", "mamba", "conv")
"""Layer types that are no attention, as configs spell them."""
BACKBONE: Mapping[str, str | Stored] = {
    "embed_tokens": "backbone.embeddings", "final_norm": "backbone.norm_f", "lm_head": "lm_head", "attn_norm": "norm",
}  # fmt: skip
"""Modules of a model of mixers alone, as Mamba spells them."""
_CONTEXT_TOKENS = 32768
"""Context of a model that knows no positions, unless its config states one: what buffers are made for."""


def read_mamba(config: HFConfig, norm: NormSpec | None = None, *, size: int = 0) -> MixerSpec:
    """Mamba as Jamba's config spells it. size: channels; 0: mamba_expand * hidden_size. Raises ModelError."""
    config = config.with_defaults(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank="auto")
    hidden_size, rank = config.size("hidden_size"), config.get("mamba_dt_rank")
    bias = config.boolean("mamba_proj_bias", False)
    return MixerSpec(
        kind="mamba",
        num_heads=size or int(config.positive("mamba_expand") * hidden_size),
        head_dim=1,
        conv_width=config.size("mamba_d_conv"),
        activation=_activation(config),
        state_size=config.size("mamba_d_state"),
        dt_rank=math.ceil(hidden_size / 16) if rank in ("auto", None) else config.size("mamba_dt_rank"),
        bias=bias,
        out_bias=bias,
        conv_bias=config.boolean("mamba_conv_bias", True),
        norm=norm,
    )


def read_mamba2(config: HFConfig, norm: NormSpec | None) -> MixerSpec:
    """Mamba-2 as Bamba's config spells it. Raises ModelError."""
    config = config.with_defaults(
        mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_d_head="auto",
    )  # fmt: skip
    num_heads, groups, dim = config.size("mamba_n_heads"), config.size("mamba_n_groups"), config.get("mamba_d_head")
    if dim in ("auto", None):
        dim = int(config.positive("mamba_expand") * config.size("hidden_size")) // num_heads
    if num_heads % groups:
        raise ModelError(f"mamba_n_heads ({num_heads}) in {config.file} is no multiple of mamba_n_groups ({groups})")
    bias = config.boolean("mamba_proj_bias", False)
    return MixerSpec(
        kind="mamba2",
        num_heads=num_heads,
        head_dim=HFConfig({"mamba_d_head": dim}, file=config.file).size("mamba_d_head"),
        conv_width=config.size("mamba_d_conv"),
        activation=_activation(config),
        num_key_heads=groups,
        state_size=config.size("mamba_d_state"),
        bias=bias,
        out_bias=bias,
        conv_bias=config.boolean("mamba_conv_bias", True),
        norm=norm,
        dt_limit=_read_limit(config),
    )


def read_delta(config: HFConfig, norm: NormSpec) -> MixerSpec:
    """The gated delta rule as Qwen3-Next's config spells it. Raises ModelError."""
    num_heads, num_key_heads = config.size("linear_num_value_heads"), config.size("linear_num_key_heads")
    if num_heads % num_key_heads:
        raise ModelError(
            f"linear_num_value_heads ({num_heads}) in {config.file} is no multiple of "
            f"linear_num_key_heads ({num_key_heads})"
        )
    return MixerSpec(
        kind="delta",
        num_heads=num_heads,
        head_dim=config.size("linear_value_head_dim"),
        conv_width=config.size("linear_conv_kernel_dim"),
        activation=_activation(config),
        num_key_heads=num_key_heads,
        state_size=config.size("linear_key_head_dim"),
        conv_bias=False,
        norm=norm,
    )


def _activation(config: HFConfig) -> Activation:
    return read_activation(config.with_defaults(hidden_act="silu"), "hidden_act")


def _read_limit(config: HFConfig) -> tuple[float, float]:
    """The bounds of step sizes; JSON has no infinity, and files spell it in several ways."""
    limit = config.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ModelError(f"time_step_limit in {config.file} must be two numbers, got {limit!r}")
    low, high = (float(value) if isinstance(value, int | float) else math.inf for value in limit)
    return low, high


def recurrent_layers(config: HFConfig, *keys: str) -> list[bool]:
    """Which layers are recurrent, by the first of these keys that lists layer types; empty if none does."""
    for key in keys:
        if types := config.texts(key):
            if len(types) != config.num_layers():
                raise ModelError(f"{config.file} has {config.num_layers()} layers, but {key} names {len(types)}")
            return [kind in RECURRENT for kind in types]
    return []


def mixers_alone(config: HFConfig, mixer: MixerSpec) -> ModelSpec:
    """A model whose layers are one mixer each, behind RMS norms. Raises ModelError."""
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        max_position_embeddings=config.size("max_position_embeddings", _CONTEXT_TOKENS),
        layers=(LayerSpec(mixer=mixer),) * config.num_layers(),
        norm=NormSpec(eps=config.number("layer_norm_epsilon", 1e-5)),
        tie_word_embeddings=config.boolean("tie_word_embeddings", True),
        dtype=config.dtype,
    )


def mixer_modules(at: str, **more: str) -> Mapping[str, str | Stored]:
    """Modules of a mixer that stands at `at` ("mamba."), as most checkpoints spell them; `more`: further ones."""
    return {
        "mixer.in_proj": f"{at}in_proj", "mixer.out_proj": f"{at}out_proj", "mixer.conv": f"{at}conv1d",
        "mixer.norm": f"{at}norm", **{f"mixer.{ours}": f"{at}{theirs}" for ours, theirs in more.items()},
    }  # fmt: skip


def delta_modules(at: str, **projections: str) -> Mapping[str, str | Stored]:
    """Modules of the delta rule whose projections and convolutions stand apart; projections: how those besides
    query, key and value are spelled, without _proj. transformers saves thirds of the convolution as those of each."""
    convolutions = {f"mixer.{name}_conv": Stored(name=f"{at}{name}_conv1d", cut_anywhere=True) for name in "qkv"}
    names = {**{name: name for name in "qkv"}, **projections}
    return {
        **mixer_modules(at), **convolutions, "mixer.norm": f"{at}o_norm", "mixer.out_proj": f"{at}o_proj",
        **{f"mixer.{ours}_proj": f"{at}{theirs}_proj" for ours, theirs in names.items()},
    }  # fmt: skip


def mixer_tensors(at: str, *, dt_bias: str = "dt_bias") -> Mapping[str, str | Stored]:
    """Tensors of a mixer beside its modules."""
    return {"mixer.a_log": f"{at}A_log", "mixer.d": f"{at}D", "mixer.dt_bias": f"{at}{dt_bias}"}
