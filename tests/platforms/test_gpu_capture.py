"""What a GPU records as a graph must ask nothing of the host: no value is read, and no array comes from there.

The emulated device records nothing, so a stricter recorder stands in: it watches every operation of a recorded step,
less what Triton's interpreter does inside of a kernel.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'headrace[cuda]'", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from golden_cases import CASES
from headrace import LLM, SamplingParams
from headrace.core.runner.torch_graphs import HOST_READS, Rerun
from headrace.core.stages import EncoderInput
from headrace.kernels.triton.launch import Launcher
from paged_seq2seq import SEQ2SEQ_CASES, make_inputs, make_seq2seq
from tiny_checkpoints import FAMILIES, save_golden_case, save_tiny

aten = torch.ops.aten
QUICK = ("deepseek_v3", "falcon_h1")


class Watch(TorchDispatchMode):
    """Raises for what a stream that captures would refuse. A single number is an argument of a kernel, no copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._numbers: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        is_number = bool(args) and any(args[0] is number for number in self._numbers)
        assert func not in HOST_READS or is_number, f"a recorded step reads a value: {func}"
        masks = [index for index in args[1] if index is not None] if func is aten.index.Tensor else []
        assert all(mask.dtype not in (torch.bool, torch.uint8) for mask in masks), "a shape depends on a value"
        result = func(*args, **(kwargs or {}))
        if func is aten.lift_fresh.default:
            assert result.dim() == 0, f"a recorded step brings an array from the host: {list(result.shape)}"
            self._numbers.append(result)
        for leaf in tree_leaves(result):
            is_wide = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64
            assert not is_wide, f"a recorded step computes in float64, which Intel's consumer GPUs lack: {func}"
        return result


def _refuse(self: torch.Tensor) -> list[Any]:
    raise AssertionError("a recorded step reads values: tolist")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Operations of each recorded step."""
    found: list[int] = []
    record, launch = Rerun.record, Launcher.launch

    def strict(self: Rerun, function: Callable[[], Any]) -> Any:
        def run() -> Any:
            with Watch() as watch, monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", _refuse)  # no operation that Watch would see
                result = function()
            found.append(watch.count)
            return result

        return record(self, run)

    def unseen(self: Launcher, *args: Any, **options: Any) -> None:
        with _disable_current_modes():
            launch(self, *args, **options)

    monkeypatch.setattr(Rerun, "record", strict)
    monkeypatch.setattr(Launcher, "launch", unseen)
    return found


@pytest.mark.parametrize(
    "name",
    [case.name if case.name == "t5" else pytest.param(case.name, marks=pytest.mark.slow) for case in SEQ2SEQ_CASES],
)
def test_decoders_behind_an_encoder_are_recorded(name: str, watched: list[int], tmp_path: Path) -> None:
    case = next(case for case in SEQ2SEQ_CASES if case.name == name)
    folder, is_speech = make_seq2seq(case, tmp_path), case.model_type == "whisper"
    inputs, targets = make_inputs(is_speech)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options: dict[str, Any] = dict(max_num_seqs=3, kv_memory="8MiB", dtype="float32", skip_tokenizer_init=True)
    with LLM(str(folder), device="cuda:emulated", **options) as llm:
        engine = llm.built.engine
        for i, (source, target) in enumerate(zip(inputs, targets, strict=True)):
            encoder = EncoderInput(features=source) if is_speech else EncoderInput(token_ids=source)
            engine.add(str(i), target, params, encoder=encoder, final_only=True)
        while engine.has_unfinished():
            engine.step()
    assert len(watched) >= 2 and min(watched) > 5, (
        "a forward pass and sampling, each run when it is recorded, at least"
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*sorted(FAMILIES), *(case.name for case in CASES))
    ],
)
def test_recorded_steps_ask_nothing_of_the_host(name: str, watched: list[int], tmp_path: Path) -> None:
    (save_tiny if name in FAMILIES else save_golden_case)(tmp_path, name)
    options: dict[str, Any] = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, kv_memory="8MiB")
    every = SamplingParams(
        temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=3, max_tokens=3, ignore_eos=True,
        logprobs=2, presence_penalty=0.5, logit_bias={5: 1.0},
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [3, 5, 7]}, {"prompt_token_ids": [4, 9]}]
    with LLM(
        str(tmp_path), device="cuda:emulated", dtype="float32", skip_tokenizer_init=True, threads=1, **options
    ) as llm:
        llm.generate(prompts, [greedy, every])
    assert len(watched) >= 3 and min(watched) > 5, (
        "forward passes and sampling, each run when it is recorded, at least"
    )
