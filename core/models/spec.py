"""A model as data. A family's config.json becomes one frozen ModelSpec; forward functions walk it.

Only what a family may vary stands here; nothing knows a family's name. New fields come with a default that
means "as in Llama".
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A normalisation. kind rms: x / rms(x) * weight; layer: (x - mean) / std * weight + bias."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    plus_one: bool = False
    """the checkpoint stores weight - 1; one is added when it is loaded"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched; names as in config.json's rope parameters."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over the first rotary_dim values of each head."""

    rotary_dim: int
    theta: float = 10000.0
    interleaved: bool = False
    """pairs (x0, x1), (x2, x3), ... instead of (x0, x[d/2]), (x1, x[d/2 + 1]), ..."""
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Self-attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int = 0
    """tokens that a token sees, itself included; 0 sees all"""
    softcap: float = 0.0
    """scores become softcap * tanh(scores / softcap); 0 leaves them"""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None
    """normalises each head of query and key before rope"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Feed-forward block: down(act(gate(x)) * up(x)) if gated, else down(act(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: residual stream, attention, feed-forward, and where the norms stand."""

    attn: AttentionSpec
    mlp: MlpSpec
    pre_norm: bool = True
    """normalise the input of attention and of the feed-forward block"""
    post_norm: bool = False
    """normalise their output before the residual add"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    kind: Literal["decoder"] = "decoder"
    embed_scale: float = 1.0
    """multiplies the token embeddings"""
    num_learned_positions: int = 0
    """rows of a learned position embedding; 0 has none"""
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    dtype: str = "float32"
    """dtype of the checkpoint as its config names it"""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)
