"""Which completions come back after an engine died: simulated engines that die of some of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.server.generation import Completion, Generation
from headrace.core.server.quarantine import Quarantine


def completions(count: int) -> list[Completion]:
    """Completions of one request."""
    generation = Generation("g", key="", on_done=lambda generation: None)
    return [
        Completion(generation=generation, index=i, prompt_token_ids=[1], sampling_params={}) for i in range(count)
    ]


@settings(max_examples=200)
@given(st.integers(1, 40), st.data())
def test_only_those_at_fault_fail(count: int, data: st.DataObject) -> None:
    """Each completion needs some tokens; a deadly one kills whatever engine computes a certain token of it."""
    work = completions(count)
    length = {c: data.draw(st.integers(1, 12)) for c in work}
    deadly_at = {c: data.draw(st.integers(0, 12)) for c in data.draw(st.lists(st.sampled_from(work), max_size=3))}
    deadly_at = {c: at for c, at in deadly_at.items() if at < length[c]}
    quarantine = Quarantine()
    engine = set(work)
    failed: set[Completion] = set()
    num_crashes = 0
    while engine or quarantine.is_active:
        if not engine:
            engine.update(quarantine.next_group(0))
            assert engine
        if any(deadly_at.get(c) == len(c.output_token_ids) for c in engine):
            num_crashes += 1
            in_engine = sorted(engine, key=lambda c: c.index)
            engine.clear()
            culprit = quarantine.crashed(in_engine)
            if culprit is not None:
                culprit.is_finished = True
                failed.add(culprit)
            engine.update(quarantine.next_group(0))
            continue
        for c in sorted(engine, key=lambda c: c.index):
            c.output_token_ids.append(7)
            c.is_finished = len(c.output_token_ids) >= length[c]
            if c.is_finished:
                engine.discard(c)
            if quarantine.progressed(c):
                engine.update(quarantine.next_group(len(engine)))
    assert failed == set(deadly_at)
    assert all(c.is_finished for c in work)
    assert num_crashes <= len(deadly_at) * (count.bit_length() + 3) * 2


@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_kill_from_outside_fails_nobody(count: int) -> None:
    work = completions(count)
    quarantine = Quarantine()
    random.Random(count).shuffle(work)
    assert quarantine.crashed(work) is None
    back: list[Completion] = []
    while quarantine.is_active:
        group = quarantine.next_group(len(back))
        assert len(group) <= -(-count // 2)
        back += group
        for completion in group:
            completion.output_token_ids += [1, 2, 3]
            quarantine.progressed(completion)
    assert sorted(c.index for c in back) == list(range(count))
