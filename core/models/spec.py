"""A model as data. A family's config.json becomes one frozen ModelSpec; forward functions walk it.

Only what a family may vary stands here; nothing knows a family's name. New fields come with a default that
means "as in Llama".
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .params import Param

if TYPE_CHECKING:
    from .vision_spec import VisionSpec

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_10", "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "hardswish", "mish",
    "laplace", "linear", "tanh", "sigmoid", "softplus", "sqrtsoftplus",
]  # fmt: skip
RouterScore = Literal["softmax", "sigmoid", "sparsemixer"]
NormOver = Literal["head", "heads", "all"]
Pooling = Literal["mean", "cls", "last"]


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

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
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
    num_turned: int = 0
    """proportional: pairs of values that are turned, by the frequencies that they have among all of the head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over the first rotary_dim values of each head."""

    rotary_dim: int
    is_odd: bool = False
    """one less was asked for, and frequencies are those of so many"""
    theta: float = 10000.0
    backwards: bool = False
    """turn the other way (nanochat)"""
    interleaved: bool = False
    """pairs (x0, x1), (x2, x3), ... instead of (x0, x[d/2]), (x1, x[d/2 + 1]), ..."""
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    """where a token has several positions (of a patch: row and column; M-RoPE: time too): by which of them each of
    the rotary_dim / 2 frequencies turns"""
    frequencies: Literal["all", "repeated", "alternating"] = "all"
    """repeated: each of two axes turns by every second frequency, the same ones; alternating: by those that the other
    does not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are linear in one latent vector.

    The cache holds the latent and one rotated key a token; queries are taken into the latent space instead.
    """

    q_lora_rank: int
    """size of the latent of queries; 0: queries are projected directly"""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm: NormSpec
    """normalises both latents"""
    kv_scale: float = 1.0
    """multiplies the normalised latent of keys and values (LongCat)"""
    bias: bool = False
    """biases on the projections into the latents"""


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
    chunk: int = 0
    """a token sees none before the last multiple of this up to its own position (Llama 4); 0 sees all"""
    softcap: float = 0.0
    """scores become softcap * tanh(scores / softcap); 0 leaves them"""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None
    """normalises query and key before rope"""
    qk_norm_over: NormOver = "head"
    """head: each head, all with one weight; heads: each head, each with its own; all: all heads as one vector"""
    norm_after_rope: bool = False
    """qk_norm comes after rope"""
    clip_qkv: float = 0.0
    """query, key (after qk_norm) and value are clamped to [-clip_qkv, clip_qkv]; 0 leaves them"""
    alibi_max_bias: float = 0.0
    """linear position biases (Press et al. 2021) whose slopes end at 2^-alibi_max_bias; 0 has none"""
    alibi_scale: float = 1.0
    """multiplies the slopes"""
    sinks: bool = False
    """a learned logit of each head takes part in its softmax, with no value"""
    gated: bool = False
    """the output is multiplied by sigmoid(gate_proj(x)) before o_proj"""
    gate_in_query: bool = False
    """gated by what q_proj gives for each head beside its query"""
    gate_by_head: bool = False
    """gate_proj gives one number for each head"""
    gate_activation: Activation = "sigmoid"
    """of what gate_proj gives"""
    out_norm: NormSpec | None = None
    """normalises all heads' output as one vector before o_proj"""
    v_head_dim: int = 0
    """values of a head that its value has, if they are fewer than head_dim; the cache holds zeros for the others"""
    qk_head_dim: int = 0
    """likewise of query and key"""
    difference: float = 0.0
    """differential attention (Ye et al. 2024): heads of the second half are taken, times a learned factor that starts
    at this, from those of the first, over values of two heads; the cache holds keys and values twice"""
    temperature_scale: float = 0.0
    """queries grow by 1 + temperature_scale * log(1 + floor((position + temperature_shift) / temperature_length))"""
    temperature_length: int = 1
    temperature_shift: int = 0
    in_scale: float = 1.0
    """multiplies the input"""
    out_scale: float = 1.0
    """multiplies the output"""
    value_norm: NormSpec | None = None
    """normalises each head of the value"""
    value_is_key: bool = False
    """there is no v_proj: the value is what k_proj gives, before norm and rope"""
    kv_layer: int = -1
    """the layer before whose keys and values are read; -1: the layer writes its own"""
    in_window: bool = False
    """of an encoder of images: a patch sees those of its window alone"""
    has_padding: bool = False
    """of an encoder of images: rows that are padding are seen by all others, and do not see each other (Llama 3.2)"""
    latent: LatentSpec | None = None
    """head_dim is then that of the cache, kv_lora_rank + qk_rope_head_dim, of one KV head"""

    @property
    def qk_dim(self) -> int:
        """Values that a head of query and key has of its own."""
        return self.qk_head_dim or self.head_dim

    @property
    def num_own_heads(self) -> int:
        """Heads that q_proj gives."""
        return self.num_heads // 2 if self.difference else self.num_heads

    @property
    def num_own_kv_heads(self) -> int:
        """Heads that k_proj and v_proj give."""
        return self.num_kv_heads // 2 if self.difference else self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec:
    """A convolution over time with padding so that num_frames / stride rows come out, and its activation."""

    kernel: int
    stride: int = 1
    activation: Activation = "gelu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Feed-forward block: down(act(gate(x)) * up(x)) if gated, else down(act(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    """multiplies gate_proj's output before the activation"""
    out_scale: float = 1.0
    """multiplies the output"""
    inner_norm: NormSpec | None = None
    """normalises the input of down_proj"""
    sparsity: float = 0.0
    """share of gate_proj's output that is cut to 0, if it has a normal distribution, and as much from the rest
    (Gemma 3n)"""
    xielu: bool = False
    """the activation is xIELU (Huang and Schlag 2024), which has two parameters, instead"""
    xielu_alphas: tuple[float, float] | None = None
    """those parameters, where the checkpoint has no tensors of them"""


NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0, scale=1.0)
NO_MLP = MlpSpec(intermediate_size=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of feed-forward blocks: a router picks num_experts_per_token of num_experts for each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """of one expert"""
    activation: Activation = "silu"
    score: RouterScore = "softmax"
    """softmax, sigmoid: of the router's logits; sparsemixer: Phi-3.5-MoE's two masked softmaxes (Liu et al. 2023)"""
    renormalize: bool = True
    """weights of the chosen experts are divided by their sum"""
    weight_scale: float = 1.0
    """multiplies the weights"""
    has_correction: bool = False
    """a learned number per expert is added to the scores for the choice, not for the weights"""
    num_groups: int = 1
    num_groups_per_token: int = 1
    """only experts of so many groups are chosen from (DeepSeek)"""
    group_score: Literal["max", "top2"] = "top2"
    """a group's score: its best expert's, or the sum of its best two"""
    gated: bool = True
    """experts are down(act(gate(x)) * up(x)), else down(act(up(x)))"""
    num_identities: int = 0
    """experts behind the others that give back what they read (LongCat)"""
    latent_size: int = 0
    """experts read and write a projection of x of this size; 0: x itself"""
    router_bias: bool = False
    bias: bool = False
    """biases on the experts' projections"""
    router_softcap: float = 0.0
    """the router's logits become router_softcap * tanh(logits / router_softcap); 0 leaves them"""
    clamp: float = 0.0
    """gpt-oss: gate is clamped to at most this, up to within it, and the block is
    (up + 1) * gate * sigmoid(alpha * gate); 0 is plain act(gate) * up"""
    alpha: float = 1.702
    router_scale: float = 1.0
    """multiplies the router's input where experts stand beside a dense block"""
    scale_input: bool = False
    """weights multiply the experts' input instead of their output (Llama 4)"""
    shared: MlpSpec | None = None
    """a block that every token passes"""
    out_norm: NormSpec | None = None
    """normalises the output, the shared block's included"""
    may_lack_correction: bool = False
    """a checkpoint without corrections has zeros"""
    shared_gated: bool = False
    """the shared block's output is multiplied by sigmoid(shared_gate(x))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSpec:
    """A recurrence over positions, which keeps a state instead of keys and values.

    mamba: a selective state space for each channel; mamba2: one with a scalar decay for each head; delta: the gated
    delta rule; conv: a short convolution between two gates (LFM2); lightning: attention without a softmax that
    forgets at a fixed rate (Lightning Attention, Qin et al. 2024); wkv: a weighted mean of values for each channel,
    and a feed-forward block that keeps a state too (RWKV-4, Peng et al. 2023); lru: a real-gated linear recurrent
    unit for each channel (Griffin, De et al. 2024).
    """

    kind: Literal["mamba", "mamba2", "delta", "conv", "lightning", "wkv", "lru"]
    num_heads: int
    head_dim: int
    """values of a head; mamba, conv, wkv, lru: 1, every channel is a head"""
    conv_width: int = 4
    activation: Activation = "silu"
    """behind the convolution; lightning: of query, key and value; lru: of what multiplies the output"""
    num_blocks: int = 1
    """lru: along the diagonal of the matrices that its gates come from"""
    num_key_heads: int = 1
    """groups of heads that share what is written and read by"""
    state_size: int = 0
    """what is kept for each value: the size of keys"""
    dt_rank: int = 0
    """mamba: size of the latent from which step sizes come"""
    bias: bool = False
    """a bias on the projection in"""
    out_bias: bool = False
    """a bias on the projection out"""
    conv_bias: bool = True
    norm: NormSpec | None = None
    """mamba: of step size, b and c; mamba2: of the gated output, by group; delta: of each head's output, before the
    gate"""
    norm_first: bool = False
    """mamba2: the output is normalised, then gated"""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """bounds of step sizes"""
    beta_scale: float = 1.0
    """delta: 2 where the rate of learning goes up to 2"""
    decay_rank: int = 0
    """delta: size of the latent from which decays come, one for each value of a key (Kimi Linear); 0: one for each
    head"""
    gate_rank: int = 0
    """delta: size of the latent from which the gate of the output comes; 0: it is projected directly"""
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    """delta: of the gate of the output"""
    slope_scale: float = 1.0
    """lightning: multiplies the rates of forgetting, which are ALiBi's slopes"""
    shift_size: int = 0
    """wkv: the model's hidden size, of which the token before is kept for both blocks"""
    mlp_size: int = 0
    """wkv: values inside the feed-forward block; out_scale holds for it too"""
    multipliers: tuple[float, ...] = ()
    """mamba2: of the parts of in_proj's output (gate, x, b, c, dt)"""
    in_scale: float = 1.0
    out_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """A transformer block before a layer's mixer (Zamba), whose weights several layers share.

    It reads the residual stream beside the embeddings; what it gives is added to the mixer's input alone. Its
    attention is the layer's, which has keys and values of its own.
    """

    mlp: MlpSpec
    owner: int
    """the layer under whose name the weights are kept"""
    number: int
    """of the layer among those with such a block: which adapters are its own"""
    adapter_rank: int = 0
    """of what each layer adds to the shared projections; 0: nothing"""
    has_attn_adapter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: residual stream, attention, feed-forward, and where the norms stand.

    A layer may lack attention (zero heads) or its feed-forward block (zero size).
    """

    attn: AttentionSpec = NO_ATTENTION
    mlp: MlpSpec = NO_MLP
    mixer: MixerSpec | None = None
    """a recurrence in the place of attention, or beside it: their outputs are added"""
    shared: SharedSpec | None = None
    cross: AttentionSpec | None = None
    """attention to the output of the encoder, every token of which every query sees: between attention and mlp, with
    norms where those of attention are"""
    cross_gated: bool = False
    """learned numbers multiply what it and the feed-forward block give; tokens that see nothing skip both"""
    moe: MoeSpec | None = None
    """takes the place of mlp"""
    moe_beside: bool = False
    """moe reads the residual beside mlp, between norms of its own, instead (Gemma 4)"""
    moe_ahead: bool = False
    """moe reads what mlp reads, instead, and its output is added behind the next layer (LongCat)"""
    has_scalar: bool = False
    """the residual is multiplied by a learned number behind the layer"""
    laurel_rank: int = 0
    """of a learned path of low rank beside attention (LAuReL, Menghani et al. 2024); 0 has none"""
    pre_norm: bool = True
    """normalise the input of attention and of the feed-forward block"""
    attn_pre_norm: bool = True
    """False: attention reads the residual as it is, whatever pre_norm says (ModernBERT's first layer)"""
    post_norm: bool = False
    """normalise their output before the residual add"""
    norm_after_add: bool = False
    """normalise the sum after each residual add instead"""
    parallel: bool = False
    """both blocks read the same residual stream: x + attention(norm(x)) + feed_forward(norm(x))"""
    shared_norm: bool = False
    """in a parallel layer: one norm serves both blocks"""
    stream_scale: float = 1.0
    """multiplies the stream behind a layer without feed-forward block (RWKV halves it, so that half precision holds
    it)"""
    residual_scale: float = 1.0
    """multiplies each block's output before the residual add"""
    stream_scales: tuple[float, float] | None = None
    """the stream goes on behind the norm before each block, multiplied by these (MiniMax); None: before it"""

    @property
    def has_attention(self) -> bool:
        """False for a layer without keys and values."""
        return self.attn.num_heads > 0

    @property
    def has_feed_forward(self) -> bool:
        """False for a layer that is attention or a recurrence alone."""
        return self.moe is not None or self.mlp.intermediate_size > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A linear layer over pooled vectors or rows: norm(activation(x @ weight.T + bias))."""

    name: str
    """begins its parameters' names, such as classifier"""
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation | None = None
    norm: NormSpec | None = None
    norm_first: bool = False
    """the activation comes behind the norm"""
    gated: bool = False
    """two layers instead, gate_proj and up_proj behind its name: activation(gate) * up"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec:
    """From the hidden states of a whole request to one vector: an embedding, or the logits of labels."""

    kind: Pooling
    """mean of all tokens, the first token (cls), or the last one"""
    dense: tuple[DenseSpec, ...] = ()
    labels: tuple[str, ...] = ()
    """names of the last layer's outputs; empty for an embedding"""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """turns logits of labels into scores"""
    normalize: bool = False
    """an embedding is divided by its length"""
    max_tokens: int = 0
    """where longer texts are cut if they may be; 0: where the model's positions end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Alternating updates (Baykal et al. 2023): several residual streams, of which one passes each layer, while the
    others follow it by factors that the layer computes for each token."""

    num_streams: int
    active: int = 0
    """the stream that passes layers"""
    scales_output: bool = True
    """what is read of the active stream behind a layer is multiplied by learned numbers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSpec:
    """A model that transformers' own modelling code computes, with our attention: it is of no family here."""

    attention: tuple[str, ...]
    """modules of its layers' attention"""
    params: tuple[Param, ...]
    """named as transformers names them; matrices, however many dimensions theirs have"""
    keeps_logits: bool = False
    """its forward pass can be told which tokens' logits to compute"""
    trust_remote_code: bool = False
    """its code is part of its folder"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersSpec:
    """Low-rank adapters (Hu et al. 2021): a token may run through one of them, which adds B A x to a linear layer."""

    num_adapters: int
    ranks: tuple[tuple[str, int], ...] = ()
    """by the name of a linear layer that has any, such as layers.0.attn.o_proj: rows of A, the most that one has"""
    rank: int = 0
    """of each part of every other layer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """encoder: every token sees every other one, and nothing is cached; encoder_decoder: a decoder whose layers have
    cross attention to what `encoder` makes of another input"""
    encoder: "ModelSpec | None" = None
    """reads the other input; its parameters begin with "encoder." """
    vision: "VisionSpec | None" = None
    """reads the images of a prompt"""
    num_features: int = 0
    """of an encoder that reads frames of so many numbers, such as a mel spectrogram, instead of tokens"""
    convolutions: tuple[ConvolutionSpec, ...] = ()
    """of such an encoder: from its frames to its positions"""
    shares_embedding: bool = False
    """of an encoder: its token embeddings are the decoder's"""
    embed_scale: float = 1.0
    """multiplies the token embeddings"""
    num_learned_positions: int = 0
    """rows of a learned position embedding; 0 has none"""
    sinusoids: Literal["", "interleaved", "halves"] = ""
    """the position embedding holds sines and cosines where the checkpoint has none: with the frequencies of the
    2 i-th value (Vaswani et al. 2017), or spread evenly from 1 to 1 / 10000 over each half (tensor2tensor)"""
    first_position: int = 0
    """the row of the position embedding where position 0 stands; those before it are not read"""
    num_extra_tokens: int = 0
    """rows of the token embedding behind the vocabulary, of tokens that are read and never written"""
    embed_size: int = 0
    """size of token embeddings if it is not hidden_size: projected in after embedding, out before the head; of an
    encoder, size of all embeddings, projected behind their norm"""
    embed_norm: bool = False
    """normalise the embeddings"""
    positions_last: bool = False
    """of a decoder: positions are added behind that norm"""
    layer_input_size: int = 0
    """each layer reads so many values of the tokens themselves (Gemma 4); 0 has none"""
    altup: AltUpSpec | None = None
    num_relative_buckets: int = 0
    """rows of a learned bias of attention by distance (T5's buckets), one for all layers; 0 has none"""
    relative_rows: tuple[int, ...] = ()
    """which of them those of ops are, where the model cuts distances into other buckets; empty: the same ones"""
    relative_bias_by_layer: bool = False
    """each layer has its own"""
    num_token_types: int = 0
    """rows of a learned embedding of token types (which text of a pair); 0 has none"""
    num_task_types: int = 0
    """rows of a learned embedding of tasks, of which the first is added to each token (ERNIE); 0 has none"""
    final_norm: bool = True
    """normalise the last layer's output"""
    final_eps: float = 0.0
    """the epsilon of that norm; 0: the others'"""
    tie_word_embeddings: bool = False
    head_transform: "DenseSpec | None" = None
    """stands before the head"""
    lm_head_bias: bool = False
    lm_head_unit_rows: bool = False
    """each row of the head is divided by its length when it is loaded"""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    dtype: str = "float32"
    """dtype of the checkpoint as its config names it"""
    num_further_layers: int = 0
    """layers behind the last one that a checkpoint may hold, which predict further tokens and are not read"""
    pooler: PoolerSpec | None = None
    """makes vectors, and then there is no lm_head and no token"""
    foreign: ForeignSpec | None = None
    """of a model of no family; layers then say what is cached, and nothing else"""
    adapters: AdaptersSpec | None = None
    """of a decoder"""

    @property
    def num_layers(self) -> int:
        """Decoder layers, or those of an encoder that stands alone."""
        return len(self.layers)
