"""Tracing and placing: a byte that an instruction reads is still the one that was written for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.core.kv.groups import kv_groups
from headrace.core.models.config import HFConfig, read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.heads import with_default_pooler
from headrace.core.models.registry import read_spec
from headrace.core.models.spec import ModelSpec
from headrace.core.weights.source import DTYPE_BYTES
from headrace.platforms.cpu.native.arena import ALIGNMENT, plan_arena
from headrace.platforms.cpu.native.trace import trace_encoder, trace_step
from headrace.platforms.cpu.native.values import CacheRef, ParamRef, Rows, Trace, Value
from published_decoders import PUBLISHED_DECODERS
from published_encoders import PUBLISHED_ENCODERS
from published_foundation import PUBLISHED_FOUNDATION
from published_recurrent import PUBLISHED_RECURRENT
from published_seq2seq import PUBLISHED_SEQ2SEQ
from published_wrappers import PUBLISHED_WRAPPERS
from tiny_checkpoints import FAMILIES, tiny_config

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    **PUBLISHED_FOUNDATION,
    **PUBLISHED_ENCODERS,
    **PUBLISHED_DECODERS,
    **PUBLISHED_RECURRENT,
    **PUBLISHED_SEQ2SEQ,
    **PUBLISHED_WRAPPERS,
}
MAX_ROWS: dict[Rows, int] = {"tokens": 7, "logits": 3, "chunk": 7}


@pytest.fixture(params=sorted(FAMILIES))
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    """The spec of a tiny model of each family."""
    tiny_config(request.param).save_pretrained(tmp_path)
    return read_spec(read_config(tmp_path))


def trace_of(spec: ModelSpec) -> Trace:
    """A trace in bfloat16, all layers in one KV group, which no sequence outgrows."""
    return trace_step(spec, "bfloat16", kv_groups(spec, 1))


def byte_range(value: Value, offset: int) -> range:
    """All bytes of the value's rows, gaps included."""
    return range(offset, offset + MAX_ROWS[value.rows] * value.stride * DTYPE_BYTES[value.dtype])


def test_no_instruction_reads_what_another_overwrote(spec: ModelSpec) -> None:
    trace = trace_of(spec)
    arena = plan_arena(trace, MAX_ROWS)
    owner: dict[int, int] = {}
    for instruction in trace.instructions:
        for value in instruction.inputs:
            if isinstance(value, Value):
                span = byte_range(value, arena.offsets[value.buffer])
                assert all(owner[at] == value.buffer for at in span), (instruction.op, value)
        for value in instruction.outputs:
            offset = arena.offsets[value.buffer]
            assert offset % ALIGNMENT == 0 and byte_range(value, offset).stop <= arena.num_bytes
            owner.update(dict.fromkeys(byte_range(value, offset), value.buffer))
    for value in (trace.hidden_states, trace.logits):
        assert all(owner[at] == value.buffer for at in byte_range(value, arena.offsets[value.buffer]))


def test_buffers_share_memory(spec: ModelSpec) -> None:
    trace = trace_of(spec)
    sizes = {
        value.buffer: len(byte_range(value, 0)) for instruction in trace.instructions for value in instruction.outputs
    }
    assert plan_arena(trace, MAX_ROWS).num_bytes < sum(sizes.values()) / 2


def test_every_parameter_is_read_and_every_cache_written_before_it_is_read(spec: ModelSpec) -> None:
    trace = trace_of(spec)
    used = {ref.name for i in trace.instructions for ref in i.inputs if isinstance(ref, ParamRef)}
    assert used == {param.name for param in declare_params(spec)}
    written: set[int] = set()
    for instruction in trace.instructions:
        for ref in instruction.inputs:
            if isinstance(ref, CacheRef):
                assert instruction.op == "write_kv" or ref.layer in written
                if instruction.op == "write_kv":
                    written.add(ref.layer)
    assert written == set(range(spec.num_layers))


def test_views_cost_no_instruction(spec: ModelSpec) -> None:
    ops = {instruction.op for instruction in trace_of(spec).instructions}
    assert not ops & {"split", "split_heads", "merge_heads"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_has_a_program_without_torch(name: str) -> None:
    config = HFConfig(PUBLISHED[name])
    spec = with_default_pooler(read_spec(config), config)
    groups = kv_groups(spec, spec.max_position_embeddings)
    traces = [trace_step(spec, "bfloat16", groups)]
    if spec.encoder is not None:
        traces.append(trace_encoder(spec, "bfloat16"))
    assert not {segment.attrs["definition"] for trace in traces for segment in trace.segments}
