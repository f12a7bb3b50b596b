"""Tables that decoders and encoders look up before their first layer."""

from functools import partial

from ..stages import Array
from .constants import sinusoids
from .scope import Scope
from .spec import ModelSpec


def embed_tokens(scope: Scope, spec: ModelSpec) -> Array:
    """The token embedding, which may serve as the head, too."""
    num_tokens = spec.vocab_size + spec.num_extra_tokens
    return scope.tokens("embed_tokens", num_tokens, spec.embed_size or spec.hidden_size)


def embed_positions(scope: Scope, spec: ModelSpec, size: int) -> Array:
    """The position embedding, learned or not. size: of its rows."""
    table = partial(sinusoids, spec, size) if spec.sinusoids else None
    return scope.table("embed_positions", spec.num_learned_positions, size, compute=table)
