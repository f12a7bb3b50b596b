"""How much memory a step's activations take where steps are recorded, so that the KV cache leaves it to them."""

from ..models.spec import LayerSpec
from ..platform import RunnerConfig
from ..weights.source import DTYPE_BYTES
from .step import PROMPT_ROWS

WIDE_BYTES = DTYPE_BYTES["float32"]
SAMPLING_ARRAYS = 20
"""Float32 arrays [num_rows, vocab_size] that sampling with every parameter holds at the same time, those inside of a
library's sort among them."""
PROMPT_ARRAYS = 4
"""The same of prompt log probabilities."""


def step_bytes(config: RunnerConfig) -> int:
    """Bytes of the largest step that runs kernel by kernel, and of the graphs, which have a memory of their own."""
    vocab_size = config.spec.vocab_size
    sampling = SAMPLING_ARRAYS * config.max_num_samples * vocab_size * WIDE_BYTES
    prompts = PROMPT_ARRAYS * min(PROMPT_ROWS, config.max_num_batched_tokens) * vocab_size * WIDE_BYTES
    each = max(_token_bytes(layer, config) for layer in config.spec.layers)
    largest = max(config.max_num_batched_tokens * each, sampling, prompts)
    return largest + max(config.max_num_seqs * each, sampling)


def _token_bytes(layer: LayerSpec, config: RunnerConfig) -> int:
    """Bytes that a token takes at the widest place of a layer: what is read and what is written there, beside the
    stream."""
    spec, size = config.spec, DTYPE_BYTES[config.dtype]
    streams = 8 * max(spec.hidden_size, spec.embed_size) * size
    if spec.altup is not None:
        streams *= 2 * spec.altup.num_streams
    streams += spec.layer_input_size * spec.num_layers * 2 * size
    widths = [0]
    if layer.has_attention:
        attn = layer.attn
        heads = attn.num_heads * max(attn.head_dim, attn.v_head_dim)
        widths.append((4 * heads + 3 * attn.num_kv_heads * attn.head_dim) * size)
    if layer.mlp.intermediate_size:
        widths.append(layer.mlp.intermediate_size * (4 * size + WIDE_BYTES))
    if layer.moe is not None:
        moe = layer.moe
        pairs = moe.intermediate_size * 3 * size + 2 * (moe.latent_size or spec.hidden_size) * WIDE_BYTES
        widths.append(moe.num_experts_per_token * pairs + 8 * moe.num_experts * WIDE_BYTES)
    if layer.mixer is not None:
        mixer = layer.mixer
        keys = mixer.num_heads if mixer.kind in ("delta", "lightning") else mixer.num_key_heads + mixer.num_blocks
        inner = mixer.num_heads * mixer.head_dim + keys * mixer.state_size
        widths.append(6 * inner * (size + WIDE_BYTES))
    return streams + sum(widths)
