"""SamplingState and sample_step together against what each request asked for, computed one request at a time."""

import dataclasses
import timeit
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import PluginError
from headrace.core.ops import OpTable
from headrace.core.sampling.params import SamplingParams
from headrace.core.sampling.sampler import sample_step
from headrace.core.sampling.state import SamplingState, allow_bits, mix_seed
from headrace.core.stages import NewRequest, SamplingBatch

VOCAB = 50
OPS = OpTable()


def make_new(slot: int, params: SamplingParams, tokens: list[int], num_prompt: int, **more: Any) -> NewRequest:
    return NewRequest(
        request_id=str(slot),
        epoch=0,
        slot=slot,
        token_ids=tokens,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        sampling_params=params,
        seed=more.pop("seed", slot),
        **more,
    )


def on_device(batch: SamplingBatch) -> SamplingBatch:
    """Arrays as torch tensors, as a runner does it."""
    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved: dict[str, Any] = {name: torch.from_numpy(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
    return dataclasses.replace(batch, **moved)


def sample(state: SamplingState, rows: list[tuple[int, int, int]], logits: torch.Tensor) -> list[int]:
    tokens: list[int] = sample_step(OPS, logits, on_device(state.build(rows))).token_ids.tolist()
    return tokens


def values(array: Any) -> list[Any]:
    """An array that must be there, as a list."""
    assert array is not None
    found: list[Any] = array.tolist()
    return found


# ---- whole requests, side by side and alone ----------------------------------------------------------------
@st.composite
def request_params(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters that change little and ones that change much."""
    token = st.integers(0, VOCAB - 1)
    return {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "top_k": draw(st.sampled_from([0, 1, 5])),
        "top_p": draw(st.sampled_from([1.0, 0.6])),
        "min_p": draw(st.sampled_from([0.0, 0.2])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, -0.4])),
        "logit_bias": draw(st.dictionaries(token, st.sampled_from([5.0, -3.0, float("-inf")]), max_size=2)),
        "allowed_token_ids": draw(st.none() | st.lists(token, min_size=30, max_size=40)),
        "min_tokens": draw(st.integers(0, 4)),
    }


@settings(max_examples=40)
@given(st.lists(request_params(), min_size=1, max_size=5), st.integers(0, 5), st.randoms())
def test_company_order_and_preemption_change_nothing(
    requests: list[dict[str, Any]], restart_at: int, random: Any
) -> None:
    """Each request's tokens in a shuffled batch, with a restart in the middle, are those that it gets alone."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(20, len(requests), VOCAB, generator=generator) * 3
    prompts = [[1, 2, 3 + n] for n in range(len(requests))]
    bad_words = ((7,), (8, 9))

    def admit(state: SamplingState, slot: int, n: int, tokens: list[int]) -> None:
        state.add(
            slot,
            make_new(
                slot, SamplingParams(**requests[n]), tokens, 3, seed=n, stop_token_ids=[0], bad_word_ids=bad_words
            ),
        )

    alone: list[list[int]] = []
    for n in range(len(requests)):
        state, tokens = SamplingState(vocab_size=VOCAB, max_num_seqs=1), list(prompts[n])
        admit(state, 0, n, tokens)
        for step in range(6):
            [token] = sample(state, [(0, 0, len(tokens))], table[step, n : n + 1])
            state.append(0, [token])
            tokens.append(token)
        alone.append(tokens)

    state = SamplingState(vocab_size=VOCAB, max_num_seqs=8)
    slots = random.sample(range(8), len(requests))
    together = [list(prompt) for prompt in prompts]
    for n, slot in enumerate(slots):
        admit(state, slot, n, together[n])
    for step in range(6):
        if step == restart_at:
            for n, slot in enumerate(slots):
                admit(state, slot, n, list(together[n]))
        order = random.sample(range(len(requests)), len(requests))
        rows = [(n, slots[n], len(together[n])) for n in order]
        for n, token in zip(order, sample(state, rows, table[step]), strict=True):
            state.append(slots[n], [token])
            together[n].append(token)
    assert together == alone
    for n, tokens in enumerate(together):
        check_rules(tokens, requests[n])


def check_rules(tokens: list[int], request: dict[str, Any]) -> None:
    outputs = tokens[3:]
    allowed = set(request["allowed_token_ids"] or range(VOCAB))
    banned = {token for token, value in request["logit_bias"].items() if value == float("-inf")} | {7}
    if not allowed - banned - {0, 9}:
        return
    assert set(outputs) <= allowed - banned
    assert 0 not in outputs[: request["min_tokens"]]
    assert (8, 9) not in list(zip(outputs, outputs[1:], strict=False))


# ---- what is built ----------------------------------------------------------------------------------------
@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=40))
def test_penalty_entries_count_the_outputs(prompt: list[int], steps: list[list[int]]) -> None:
    state = SamplingState(vocab_size=100, max_num_seqs=2)
    state.add(1, make_new(1, SamplingParams(repetition_penalty=1.2), [*prompt, 5], len(prompt)))
    outputs = [5]
    for step in steps:
        state.append(1, step)
        outputs += step
    batch = state.build([(0, 1, len(prompt) + len(outputs))])
    assert batch.penalty_tokens is not None and batch.penalty_counts is not None
    entries = dict(zip(values(batch.penalty_tokens), batch.penalty_counts.tolist(), strict=True))
    counted = Counter(outputs)
    assert len(batch.penalty_tokens) == len(entries)
    assert entries == {token: counted[token] for token in {*prompt, *outputs}}
    assert state.num_tokens(1) == len(prompt) + len(outputs)


def test_presence_alone_looks_at_the_output_only() -> None:
    state = SamplingState(vocab_size=VOCAB, max_num_seqs=1)
    state.add(0, make_new(0, SamplingParams(presence_penalty=1.0), [1, 2, 3], 2))
    assert values(state.build([(0, 0, 3)]).penalty_tokens) == [3]


def test_what_no_row_needs_is_none() -> None:
    state = SamplingState(vocab_size=VOCAB, max_num_seqs=3)
    state.add(0, make_new(0, SamplingParams(temperature=0), [1], 1))
    state.add(1, make_new(1, SamplingParams(temperature=1e-7, top_p=0.5, logit_bias={3: 1}), [1], 1))
    state.add(2, make_new(2, SamplingParams(temperature=1, top_k=-1, logprobs=3), [1], 1))
    greedy = state.build([(0, 0, 1)])
    assert greedy.rows is None and greedy.temperature is None and greedy.bias_rows is None
    assert greedy.num_logprobs == -1
    biased = state.build([(0, 0, 1), (1, 1, 1)])
    assert biased.temperature is None and biased.top_p is None and values(biased.bias_rows) == [1]
    random = state.build([(1, 2, 1), (0, 0, 1)])
    assert random.rows is not None and values(random.rows) == [1, 0]
    assert values(random.temperature) == [1, 0] and random.top_k is None and random.num_logprobs == 3
    assert (state.num_logprobs(2), state.num_logprobs(0)) == (3, -1)
    state.add(2, make_new(2, SamplingParams(temperature=0), [1], 1))
    assert state.build([(0, 2, 1)]).temperature is None and state.num_logprobs(2) == -1


def test_a_slot_may_have_several_positions() -> None:
    state = SamplingState(vocab_size=VOCAB, max_num_seqs=1)
    params = SamplingParams(temperature=1, min_tokens=2)
    state.add(0, make_new(0, params, [1, 2, 3], 3, stop_token_ids=[4]))
    batch = state.build([(0, 0, 4), (1, 0, 5)])
    assert batch.slots.tolist() == [0, 0] and batch.positions.tolist() == [4, 5]
    assert values(batch.bias_rows) == [0]  # the second position is past min_tokens


def test_the_greedy_path_is_fast() -> None:
    state = SamplingState(vocab_size=49152, max_num_seqs=64)
    for slot in range(64):
        state.add(slot, make_new(slot, SamplingParams(temperature=0), list(range(100)), 100))
    rows = [(slot, slot, 100) for slot in range(64)]
    best = min(timeit.repeat(lambda: state.build(rows), number=100, repeat=10)) / 100
    assert best < 100e-6  # 27 us on an idle core of the machine that it was written on


@given(st.sets(st.integers(0, 99)))
def test_allow_bits(allowed: set[int]) -> None:
    words = allow_bits(sorted(allowed), 100)
    assert words.shape == (4,) and words.dtype == np.int32
    assert {t for t in range(128) if (int(words[t // 32]) >> (t % 32)) & 1} == allowed


def test_all_bits_of_a_seed_count() -> None:
    seeds = [0, 1, -1, 2**32, 2**63, 2**64 - 2, 12345 << 32]
    assert len({mix_seed(seed) for seed in seeds}) == len(seeds)
    assert all(-(2**31) <= mix_seed(seed) < 2**31 for seed in seeds)


# ---- the device side --------------------------------------------------------------------------------------
def test_log_probabilities_are_of_the_raw_logits() -> None:
    state = SamplingState(vocab_size=VOCAB, max_num_seqs=2)
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={4: 100.0})
    state.add(0, make_new(0, SamplingParams(temperature=0), [1], 1))
    state.add(1, make_new(1, params, [1], 1))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    sampled = sample_step(OPS, logits, on_device(state.build([(2, 1, 1), (0, 0, 1)])))
    assert sampled.token_ids.tolist() == [4, int(logits[0].argmax())]
    assert sampled.logprobs is not None
    chosen, ranks, top_ids, top_values = sampled.logprobs
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), torch.stack([exact[2, 4], exact[0].max()]), atol=1e-5, rtol=0)
    assert ranks[0] == int((exact[2] > exact[2, 4]).sum()) + 1 and ranks[1] == 1
    assert top_ids[0].tolist() == exact[2].topk(2).indices.tolist() and top_values.shape == (2, 2)


def test_processors_see_outputs_and_edited_logits() -> None:
    seen: list[tuple[list[int], float]] = []

    def factory(params: SamplingParams, prompt: Any) -> Any:
        def process(outputs: Any, logits: Any) -> Any:
            seen.append((list(outputs), float(logits[3])))
            logits[:] = -np.inf
            logits[params.extra_args["token"]] = 0
            return logits

        return process

    state = SamplingState(vocab_size=VOCAB, max_num_seqs=2, processors={"only": factory})
    params = SamplingParams(temperature=1, logits_processors=["only"], extra_args={"token": 9}, logit_bias={3: 50.0})
    state.add(0, make_new(0, SamplingParams(temperature=0), [1], 1))
    state.add(1, make_new(1, params, [1, 2, 8], 2))
    logits = torch.zeros(2, VOCAB)
    logits[0, 6] = 1
    assert sample(state, [(0, 0, 1), (1, 1, 3)], logits) == [6, 9]
    state.append(1, [9])
    assert sample(state, [(1, 1, 4)], logits) == [9]
    assert seen == [([8], 50.0), ([8, 9], 50.0)]
    assert logits.sum() == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return an array of shape"),
        (np.zeros(3), r"got \(3,\)"),
        (ValueError("oh"), "'odd' failed: ValueError"),
    ],
)
def test_processors_that_fail_are_named(result: Any, message: str) -> None:
    def factory(params: SamplingParams, prompt: Any) -> Any:
        def process(outputs: Any, logits: Any) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        return process

    state = SamplingState(vocab_size=VOCAB, max_num_seqs=1, processors={"odd": factory})
    state.add(0, make_new(0, SamplingParams(logits_processors="odd"), [1], 1))
    with pytest.raises(PluginError, match=message):
        sample(state, [(0, 0, 1)], torch.zeros(1, VOCAB))
