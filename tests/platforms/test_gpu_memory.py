"""What a GPU's largest step is said to take, against what the same step on the emulated device holds at its peak."""

import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from headrace import LLM, SamplingParams
from headrace.core.runner.activations import SAMPLING_ARRAYS, step_bytes
from headrace.core.runner.torch import TorchRunner
from tiny_checkpoints import FAMILIES, save_golden_case, save_tiny

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'"
)
NUM_TOKENS = 64


class Peak(TorchDispatchMode):
    """Bytes of the memory that operations took and that is still held: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._held: dict[int, int] = {}

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
            tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}

        taken = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for key, storage in storages(result).items():
            if key not in taken and key not in self._held:
                self._held[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, key)
        self.most = max(self.most, self.now)
        return result


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peak of each step that runs kernel by kernel; what Triton's interpreter itself holds does not count."""
    from headrace.kernels.triton.launch import Launcher

    found: list[int] = []
    run, launch = TorchRunner.run, Launcher.launch

    def measured(self: TorchRunner, batch: Any) -> Any:
        with Peak() as peak:
            result = run(self, batch)
        found.append(peak.most)
        return result

    def unseen(self: Launcher, *args: Any, **options: Any) -> None:
        with _disable_current_modes():
            launch(self, *args, **options)

    monkeypatch.setattr(TorchRunner, "run", measured)
    monkeypatch.setattr(Launcher, "launch", unseen)
    return found


def generate(folder: Path, params: SamplingParams) -> Any:
    """The configuration of the runner, after a prompt that fills a step."""
    options: dict[str, Any] = dict(max_num_seqs=4, max_num_batched_tokens=NUM_TOKENS, max_model_len=96)
    options |= dict(dtype="float32", skip_tokenizer_init=True, threads=1, kv_memory="8MiB")
    with LLM(str(folder), device="cuda:emulated", **options) as llm:
        llm.generate([{"prompt_token_ids": [3 + 7 * i % 90 for i in range(NUM_TOKENS)]}], params)
        executor: Any = llm.built.engine.executor
        runner = executor._runner
        assert runner.runner.kv_plan().step_bytes == step_bytes(runner.config)
        return runner.config


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next", "falcon_h1", "gemma3n"])
def test_the_largest_prompt_takes_no_more_than_is_left_to_it(name: str, peaks: list[int], tmp_path: Path) -> None:
    (save_tiny if name in FAMILIES else save_golden_case)(tmp_path, name)
    config = generate(tmp_path, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    assert len(peaks) == 1, "the prompt; a step of one token is recorded"
    assert peaks[0] <= step_bytes(config) < 4.5 * peaks[0]


def test_sampling_takes_no_more_than_is_left_to_it(peaks: list[int], tmp_path: Path) -> None:
    """Of a large vocabulary, with every parameter."""
    save_tiny(tmp_path, "llama", vocab_size=20000)
    every = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=3, max_tokens=1, ignore_eos=True,
        logprobs=5, presence_penalty=0.5, logit_bias={5: 1.0},
    )  # fmt: skip
    config = generate(tmp_path, every)
    one_row = 20000 * 4
    assert SAMPLING_ARRAYS / 4 * one_row < max(peaks) < SAMPLING_ARRAYS * one_row < step_bytes(config)
