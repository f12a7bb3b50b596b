"""Bodies of the ops in plain JAX, one file a family as in core/ops: what stands behind every runner that JAX drives.

They compute what the definitions say, with shapes that never depend on a value, so that they can be traced. Beyond
the definitions, a negative row, slot or index is padding: it is dropped where something is stored.
"""

from . import attention, elementwise, moe, norm, packed, ragged, rope, sampling, state, transfer

FUNCTIONS = {
    function.__name__: function
    for module in (packed, moe, norm, rope, attention, state, ragged, elementwise, sampling, transfer)
    for function in module.FUNCTIONS
}
"""Op name -> its body."""
NAME = "jax"
"""What the report of op providers calls these bodies."""
FEATURES = frozenset(
    "sliding_window chunked_attention softcap rope_variants relative_bias cross_attention images states lora".split()
)
"""What models may need that these bodies do; names of core/models/needs.py."""
