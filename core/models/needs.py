"""What a model asks of a device beyond the ops that every model uses."""

from collections.abc import Mapping

from ..platform import Need
from .rope import rope_rows
from .spec import ModelSpec

FEATURES: Mapping[str, str] = {
    "sliding_window": "attention that sees only the last tokens",
    "chunked_attention": "attention that sees only its own chunk of the tokens (Llama 4)",
    "softcap": "attention scores bounded by tanh before the softmax",
    "relative_bias": "attention with a learned bias by distance (T5)",
    "cross_attention": "attention of a decoder to what an encoder made of another input",
    "states": "recurrences over positions, which keep states instead of keys and values",
    "foreign_code": "models of no family here, which transformers' own code computes",
    "images": "an encoder of images, whose output stands in prompts",
    "lora": "low-rank adapters, of which each request runs through its own",
    "rope_variants": "rotary tables with rows for short and for long requests (LongRoPE, dynamic)",
}
"""Every feature that a model may need, for the capabilities of a device."""


def model_needs(spec: ModelSpec) -> list[Need]:
    """The features of `FEATURES` that this model cannot do without."""
    attention = [layer.attn for layer in spec.layers]
    asked = {
        "sliding_window": any(attn.window for attn in attention),
        "chunked_attention": any(attn.chunk for attn in attention),
        "softcap": any(attn.softcap for attn in attention),
        "relative_bias": spec.num_relative_buckets > 0 and spec.kind != "encoder",
        "cross_attention": any(layer.cross is not None for layer in spec.layers),
        "states": any(layer.mixer is not None for layer in spec.layers),
        "foreign_code": spec.foreign is not None,
        "lora": spec.adapters is not None,
        "rope_variants": rope_rows(spec).num_rows > 1,
    }
    why = f"this {spec.model_type} model"
    needs = [Need(feature=feature, why=why) for feature, is_asked in asked.items() if is_asked]
    if spec.vision is not None:  # its language model runs without
        needs.append(Need(feature="images", why="an image", required=False))
    return needs
