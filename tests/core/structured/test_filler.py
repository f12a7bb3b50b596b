"""Masks are filled while the forward pass runs, on every kind of runner; what goes wrong there is one request's."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams, StructuredOutputParams
from headrace.core.errors import PluginError
from headrace.core.sampling.state import SamplingState
from headrace.core.stages import LateArray, NewRequest
from headrace.core.structured.compiler import GrammarCache
from headrace.plugins.structured_output.llguidance import OutputMatcher
from tiny_checkpoints import save_tiny
from tiny_tokenizers import train_byte_level

PATTERN = StructuredOutputParams(kind="regex", value="[a-h]{6}")
"""Every token is a choice, so that every step fills a mask."""
PARAMS = SamplingParams(temperature=0, max_tokens=10, structured_output=PATTERN)
FORWARDS = {
    "cpu": "headrace.platforms.cpu.native.program.NativeProgram.run",
    "reference": "headrace.core.runner.step.decoder",
    "gaudi:emulated": "headrace.core.runner.torch_graphs.GraphRunner.forward",
    "tpu:emulated": "headrace.core.runner.jax.JaxRunner.forward",
}
"""What runs the forward pass of a device's runner."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filler")
    save_tiny(folder, "llama", vocab_size=500, num_hidden_layers=1)
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def after(monkeypatch: pytest.MonkeyPatch, path: str, then: Callable[[], object]) -> None:
    """Have `then` called after each call of what `path` names."""
    head, name = path.rsplit(".", 1)
    try:
        owner = import_module(head)
    except ImportError:
        module, owner_name = head.rsplit(".", 1)
        owner = getattr(import_module(module), owner_name)
    call = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("device", FORWARDS)
def test_masks_are_filled_while_the_forward_pass_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Each mask waits here for the forward pass of its step: made before it, it would wait in vain."""
    if device.startswith("tpu"):
        pytest.importorskip("jax")
    ran = threading.Semaphore(0)
    fill = OutputMatcher.fill_mask
    num_masks = 0

    def late(self: OutputMatcher, row: Any) -> None:
        nonlocal num_masks
        if not ran.acquire(timeout=20):
            raise PluginError("the forward pass of this mask has not run")
        num_masks += 1
        fill(self, row)

    options: Any = dict(device=device, dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
    with LLM(str(folder), **options) as llm:
        [expected] = llm.generate("The dog", PARAMS)
        monkeypatch.setattr(OutputMatcher, "fill_mask", late)
        after(monkeypatch, FORWARDS[device], ran.release)
        [output] = llm.generate("The dog", PARAMS)
    assert output.error == "" and output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert num_masks > 2


def test_an_error_in_the_thread_is_one_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = StructuredOutputParams(kind="regex", value="[0-9]{6}")
    params = [
        PARAMS,
        SamplingParams(temperature=0, max_tokens=10, structured_output=digits),
        SamplingParams(temperature=0, max_tokens=10),
    ]
    expected = llm.generate(["The dog"] * 3, params)
    [five] = llm.tokenizer.encode("5", add_special_tokens=False)
    fill = OutputMatcher.fill_mask

    def fail_on_digits(self: OutputMatcher, row: Any) -> None:
        fill(self, row)
        if row[five // 32] >> five % 32 & 1:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(OutputMatcher, "fill_mask", fail_on_digits)
    outputs = llm.generate(["The dog"] * 3, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "error", "length"]
    assert outputs[1].error == "structured output: the grammar could not make a mask: RuntimeError: out of luck"
    for n in (0, 2):
        assert outputs[n].outputs[0].token_ids == expected[n].outputs[0].token_ids
    llm.built.engine.scheduler.check_integrity()


class Gate:
    """A grammar of the tokens 0 to 9 in turn; each mask waits for `open`."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.open = threading.Event()

    def compile(self, params: StructuredOutputParams) -> "Gate":
        return self

    def new_matcher(self) -> "Gate":
        matcher = Gate()
        matcher.open = self.open
        return matcher

    def fill_mask(self, row: Any) -> None:
        assert self.open.wait(20)
        row[:] = 1 << self.at

    def accept(self, token_ids: Sequence[int]) -> int:
        assert not token_ids or self.open.is_set(), "accepted while another thread fills the mask"
        self.at += len(token_ids)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.at -= num_tokens


def gated(slot: int, outputs: Sequence[int] = ()) -> NewRequest:
    return NewRequest(
        request_id=str(slot),
        epoch=0,
        slot=slot,
        token_ids=[1, *outputs],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        sampling_params=PARAMS,
        seed=0,
    )


def test_a_request_that_goes_waits_for_no_mask() -> None:
    """Aborted, or preempted and back again: the mask in the making is nobody's, and the thread ends."""
    gate, before = Gate(), set(threading.enumerate())
    state = SamplingState(vocab_size=32, max_num_seqs=2, grammars=GrammarCache(gate), end_token_ids=[31])
    for slot in range(2):
        state.add(slot, gated(slot))
    old = state.build([(0, 0, 1), (1, 1, 1)]).allow_mask
    assert isinstance(old, LateArray) and not old.filled.done()
    state.remove(0)
    state.remove(1)
    assert not old.filled.done()
    gate.open.set()
    state.add(1, gated(1, outputs=[0, 1]))
    new = state.build([(0, 1, 3)]).allow_mask
    assert isinstance(new, LateArray) and new.result().tolist() == [[1 << 2]]
    assert old.result().tolist() == [[1], [1]]
    state.close()
    assert set(threading.enumerate()) <= before


def test_tokens_wait_for_the_mask_in_the_making() -> None:
    gate = Gate()
    state = SamplingState(vocab_size=32, max_num_seqs=1, grammars=GrammarCache(gate), end_token_ids=[31])
    state.add(0, gated(0))
    state.build([(0, 0, 1)])
    threading.Timer(0.1, gate.open.set).start()
    state.append(0, [0])
    assert gate.open.is_set() and state.failure(0) == ""
    mask: Any = state.build([(0, 0, 2)]).arrived().allow_mask
    assert mask.tolist() == [[2]]
    state.close()
