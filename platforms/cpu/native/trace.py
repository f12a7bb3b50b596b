"""Records a forward function once, with symbolic sizes, as a list of instructions.

The forward functions treat arrays as opaque, so tracing needs no trick: a table of ops that note what they were
asked and return what the result will look like.
"""

from collections.abc import Iterator, Mapping, Sequence

from headrace.core.kv.groups import KVGroup, cross_group, group_of_layer, state_group
from headrace.core.models.declare import declare_params
from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.encoder import encoder
from headrace.core.models.encoder_decoder import encode, write_cross
from headrace.core.models.mixer import state_shapes
from headrace.core.models.params import Param
from headrace.core.models.pooler import pool
from headrace.core.models.spec import ConvolutionSpec, MixerSpec, ModelSpec
from headrace.core.runner.caches import image_row_size
from headrace.core.stages import EncoderBatch, ForwardBatch, KVCaches, PoolingBatch

from .tracer import Tracer
from .values import CacheRef, InputRef, ParamRef, RowsRef, StateRef, Trace, UntraceableOp


def trace_step(spec: ModelSpec, dtype: str, groups: Sequence[KVGroup], *, adapted: bool = False) -> Trace:
    """Trace a step of a spec whose activations have `dtype`: hidden states, and logits or the vectors that the model
    makes. adapted: tokens have adapters, whose numbers stand in the place of their types. Raises UntraceableOp."""
    if spec.foreign is not None:
        raise UntraceableOp("transformers' own code computes it")
    tracer = Tracer(dtype)
    params = _Params({param.name: param for param in declare_params(spec)})
    num_groups, sees_ahead = len(groups), spec.vision is not None and spec.vision.sight != "past"
    batch = ForwardBatch(
        input_ids=InputRef(field="input_ids"),
        positions=InputRef(field="positions"),
        query_start_loc=InputRef(field="query_start_loc"),
        seq_lens=InputRef(field="seq_lens"),
        block_tables=[InputRef(field="block_tables", group=group) for group in range(num_groups)],
        slot_mappings=[InputRef(field="slot_mappings", group=group) for group in range(num_groups)],
        logits_indices=InputRef(field="logits_indices"),
        token_types=InputRef(field="token_types"),
        encoder_lens=InputRef(field="encoder_lens"),
        rope_rows=InputRef(field="rope_rows"),
        image_rows=InputRef(field="image_rows"),
        rope_positions=InputRef(field="rope_positions"),
        reach=InputRef(field="reach") if sees_ahead else None,
        adapters=InputRef(field="token_types") if adapted else None,
    )
    ops, kv = tracer.table(), _caches(spec, groups)
    if spec.kind == "encoder":
        hidden_states = encoder(ops, spec, params, batch)
    else:
        hidden_states, _ = decoder(ops, spec, params, kv, batch)
    if spec.pooler is not None:
        ranges = PoolingBatch(starts=InputRef(field="starts"), ends=InputRef(field="ends"))
        logits = pool(ops, spec, params, hidden_states, ranges)
    else:
        logits = compute_logits(ops, spec, params, ops.gather(hidden_states, batch.logits_indices))
    return Trace(
        instructions=tuple(tracer.instructions),
        num_buffers=tracer.num_buffers,
        hidden_states=hidden_states,
        logits=logits,
    )


def _states(mixer: MixerSpec | None, layer: int) -> Sequence[StateRef]:
    return [] if mixer is None else [StateRef(layer=layer, index=i) for i in range(len(state_shapes(mixer)))]


def trace_encoder(spec: ModelSpec, dtype: str) -> Trace:
    """Trace what the encoder of an encoder-decoder model reads and leaves in the caches of cross attention.

    Its slot mapping is that of group 0. Raises UntraceableOp.
    """
    assert spec.encoder is not None, "only models with an encoder have another input"
    tracer = Tracer(dtype)
    params = _Params({param.name: param for param in declare_params(spec)})
    num_features = spec.encoder.num_features
    batch = EncoderBatch(
        input_ids=InputRef(field="input_ids"),
        positions=InputRef(field="positions"),
        query_start_loc=InputRef(field="query_start_loc"),
        slot_mapping=InputRef(field="slot_mappings"),
        features=tracer.features(num_features) if num_features else None,
        windows=_windows(spec.encoder.convolutions),
        dtype=dtype,
    )
    encode(tracer.table(), spec, params, _caches(spec, ()), batch)
    [*_, last] = (value for instruction in tracer.instructions for value in instruction.outputs)
    return Trace(
        instructions=tuple(tracer.instructions), num_buffers=tracer.num_buffers, hidden_states=last, logits=last
    )


def trace_cross(spec: ModelSpec, dtype: str) -> Trace:
    """Trace what rows of images, which are its features, leave in the caches of cross attention.

    Its slot mapping is that of group 0. Raises UntraceableOp.
    """
    tracer = Tracer(dtype)
    params, ops = _Params({param.name: param for param in declare_params(spec)}), tracer.table()
    all_rows = InputRef(field="windows", group=0, rows="tokens", cols=1)
    rows = ops.cast(ops.stack_rows(tracer.features(spec.hidden_size), all_rows), dtype=dtype)
    batch = EncoderBatch(
        positions=None, query_start_loc=None, slot_mapping=InputRef(field="slot_mappings"), dtype=dtype
    )
    write_cross(ops, spec, params, _caches(spec, ()), batch, rows)
    return Trace(
        instructions=tuple(tracer.instructions), num_buffers=tracer.num_buffers, hidden_states=rows, logits=rows
    )


def _windows(convolutions: Sequence[ConvolutionSpec]) -> list[InputRef]:
    """The rows that each convolution stacks: those of frames, and those of tokens behind the last one."""
    if any(convolution.stride != 1 for convolution in convolutions[:-1]):
        raise UntraceableOp("only the last convolution of an encoder may have a stride")
    last = len(convolutions) - 1
    return [
        InputRef(field="windows", group=n, rows="tokens" if n == last else "logits", cols=convolution.kernel)
        for n, convolution in enumerate(convolutions)
    ]


def _caches(spec: ModelSpec, groups: Sequence[KVGroup]) -> KVCaches:
    return KVCaches(
        layers=[CacheRef(layer=layer) for layer in range(spec.num_layers)],
        group_of_layer=group_of_layer(groups, spec.num_layers),
        states=[_states(layer.mixer, i) for i, layer in enumerate(spec.layers)],
        state_group=state_group(groups),
        cross=[CacheRef(layer=layer, is_cross=True) for layer in range(spec.num_layers)],
        cross_group=cross_group(groups),
        images=RowsRef(column=0, cols=image_row_size(spec)),
    )


class _Params(Mapping[str, ParamRef]):
    """Declared parameters as references."""

    def __init__(self, declared: Mapping[str, Param]) -> None:
        self._declared = declared

    def __getitem__(self, name: str) -> ParamRef:
        param = self._declared[name]
        return ParamRef(name=name, shape=param.shape, num_stacked=param.num_stacked if param.kind == "stacked" else 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)
