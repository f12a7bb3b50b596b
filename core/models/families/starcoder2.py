"""StarCoder 2: layer norms, a plain GELU block, biases everywhere, a window."""

from ..config import HFConfig
from ..llama_like import FULL, SLIDING, layer_norm, llama_like, replace_mlp, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama's attention in a GPT-2 block; all layers slide if `sliding_window` is set."""
    config = config.with_defaults(
        num_key_value_heads=2, max_position_embeddings=4096, hidden_act="gelu_pytorch_tanh", sliding_window=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    kind = SLIDING if config.integer("sliding_window", null=0) else FULL
    layer_types = [kind] * config.num_layers()
    spec = llama_like(config, layer_types=layer_types, norm=layer_norm(config, "norm_epsilon"))
    bias = config.boolean("use_bias", True)
    return with_biases(replace_mlp(spec, gated=False), attention=bias, mlp=bias)
