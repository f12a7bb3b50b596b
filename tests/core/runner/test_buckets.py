"""Buckets: every step that a scheduler may plan has a shape that warmup compiled, with drafts too."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.models.config import HFConfig
from headrace.core.models.registry import read_spec
from headrace.core.platform import RunnerConfig
from headrace.core.runner.buckets import Buckets, ForwardBucket, Grid
from headrace.core.runner.encode_buckets import EncodeBucket
from headrace.core.self_test import tiny_config, tiny_spec
from headrace.core.stages import EncoderBatch, ForwardBatch
from published_seq2seq import PUBLISHED_SEQ2SEQ


def batch_of(counts: list[int], width: int) -> ForwardBatch:
    """A step of rows of so many tokens."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    nothing = np.zeros(starts[-1], np.int32)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=starts,
        seq_lens=np.array(counts, np.int32),
        block_tables=[np.zeros((len(counts), width), np.int32)],
        slot_mappings=[nothing],
        logits_indices=nothing,
        max_query_len=max(counts),
        max_seq_len=max(counts),
    )


@cache
def all_of(
    grid: Grid, num_draft_tokens: int, max_num_seqs: int
) -> tuple[RunnerConfig, Buckets, frozenset[ForwardBucket]]:
    """A configuration, its buckets, and the forward passes that warmup compiles."""
    config = replace(
        tiny_config(tiny_spec()),
        num_draft_tokens=num_draft_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
    )
    buckets = Buckets(config, grid)
    return config, buckets, frozenset(buckets.all_forward())


@pytest.mark.parametrize("grid", [Grid(), Grid(smallest_reqs=1, num_reqs=2, few_reqs=True)], ids=["far", "near"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 32])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
@settings(max_examples=25)  # for each of 24 configurations
@given(data=st.data())
def test_steps_have_a_shape_that_was_compiled(
    grid: Grid, num_draft_tokens: int, max_num_seqs: int, data: st.DataObject
) -> None:
    config, buckets, compiled = all_of(grid, num_draft_tokens, max_num_seqs)
    most = -(-config.max_model_len // config.block_size)
    counts, num_samples, left = [], 0, config.max_num_samples
    for _ in range(data.draw(st.integers(1, max_num_seqs))):
        num_drafts = data.draw(st.integers(0, max(0, min(num_draft_tokens, left - max_num_seqs))))
        left -= num_drafts
        chunk = data.draw(st.sampled_from([1, 1, 5]))
        counts.append(1 + num_drafts if chunk == 1 else chunk)
        num_samples += 1 + (num_drafts if chunk == 1 else 0)
    bucket = buckets.forward(batch_of(counts, data.draw(st.integers(1, most))), num_samples)
    assert bucket.num_tokens >= sum(counts) and bucket.num_reqs >= len(counts) and bucket.num_picked >= num_samples
    assert bucket in compiled
    assert bucket.num_picked in {sample.num_samples for sample in buckets.all_sample()}


@pytest.mark.parametrize("name", ["flan_t5_base", "whisper_base"])
@given(data=st.data())
def test_an_encoder_has_a_compiled_shape_for_what_may_be_admitted(name: str, data: st.DataObject) -> None:
    config, buckets, compiled = encoder_of(name)
    spec = config.spec.encoder
    assert spec is not None
    longest, budget = config.groups[-1].num_tokens, config.max_num_batched_tokens
    one = st.just(longest) if spec.num_features else st.integers(1, longest)
    lens, taken = [data.draw(one)], 0
    for more in data.draw(st.lists(one, max_size=20)):
        taken = sum(lens)
        if taken + more <= budget:
            lens.append(more)
    starts = np.cumsum([0, *lens]).astype(np.int32)
    nothing = np.zeros(starts[-1], np.int32)
    batch = EncoderBatch(positions=nothing, query_start_loc=starts, slot_mapping=nothing)
    bucket = buckets.encode.of(batch)
    assert bucket.num_tokens >= sum(lens)
    assert bucket in compiled
    packed = buckets.encode.values(batch, bucket)["query_start_loc"]
    assert packed.shape == buckets.layout(bucket)["query_start_loc"][0] and packed[-1] == sum(lens)


@cache
def encoder_of(name: str) -> tuple[RunnerConfig, Buckets, frozenset[EncodeBucket]]:
    """A published model's configuration, its buckets, and the passes of its encoder that warmup compiles."""
    spec = read_spec(HFConfig(dict(PUBLISHED_SEQ2SEQ[name])))
    config = replace(tiny_config(spec), max_num_batched_tokens=2048)
    buckets = Buckets(config, Grid())
    return config, buckets, frozenset(buckets.encode.all())
