"""Packed steps: what is unpacked on the device is what was packed on the host, in one buffer."""

import dataclasses
from typing import Any

import numpy as np
import torch

from headrace.core.runner.packed import ALIGN_WORDS, cut, join, pack
from headrace.core.stages import ForwardBatch, PromptLogprobsBatch, SamplingBatch, StepInput


def step() -> StepInput:
    def ints(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.random.default_rng(len(shape)).integers(-(2**31), 2**31, shape).astype(np.int32)

    tables = ints(3, 9)
    return StepInput(
        forward=ForwardBatch(
            input_ids=ints(5),
            positions=ints(5),
            query_start_loc=ints(4),
            seq_lens=ints(3),
            block_tables=[tables[:, :4], tables[:, 4:]],
            slot_mappings=[ints(5), ints(5)],
            logits_indices=ints(0),
            max_query_len=3,
        ),
        sampling=SamplingBatch(
            rows=None,
            slots=ints(2),
            positions=ints(2),
            seeds=ints(2),
            temperature=np.array([0.1, -0.0], np.float32),
            allow_mask=ints(2, 7),
            bias_values=np.array([-np.inf], np.float32),
            num_logprobs=4,
        ),
        prompt_logprobs=PromptLogprobsBatch(rows=ints(3), targets=ints(3), num_logprobs=1),
    )


def arrays(batch: StepInput) -> list[object]:
    assert batch.sampling is not None and batch.prompt_logprobs is not None
    parts: list[Any] = [batch.forward, batch.sampling, batch.prompt_logprobs]
    values = [getattr(part, field.name) for part in parts for field in dataclasses.fields(part)]
    return [array for value in values for array in (value if isinstance(value, list) else [value])]


def test_what_comes_out_is_what_went_in() -> None:
    batch = step()
    packed = pack(batch)
    unpacked = packed.unpack(torch.from_numpy(packed.words.copy()))
    for got, want in zip(arrays(unpacked), arrays(batch), strict=True):
        if isinstance(want, np.ndarray):
            assert isinstance(got, torch.Tensor)
            np.testing.assert_array_equal(got.numpy(), want)
            assert got.numpy().dtype == want.dtype
            assert got.storage_offset() % ALIGN_WORDS == 0
        else:
            assert got == want


def test_the_forward_batch_lies_first_whatever_is_sampled() -> None:
    batch = step()
    alone, whole = pack(StepInput(forward=batch.forward)), pack(batch)
    assert alone.forward_words == whole.forward_words == len(alone.words)
    assert alone.layout.forward == whole.layout.forward


def test_results_are_cut_as_they_were_joined() -> None:
    results = [
        torch.tensor([3, -1], dtype=torch.int32),
        torch.tensor([[0.5, float("-inf")], [1e-30, 2.0]]),
        torch.empty((0, 3), dtype=torch.float32),
        torch.tensor([[7]], dtype=torch.int32),
    ]
    for got, want in zip(cut(join(results).numpy(), results), results, strict=True):
        np.testing.assert_array_equal(got, want.numpy())
        assert got.dtype == want.numpy().dtype
