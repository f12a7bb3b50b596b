"""On the cpu platform a request's log probabilities are bitwise the same alone, in any batch, however it is cut,
with a prefix hit or without, after a preemption, and with any number of threads."""

import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tiny_checkpoints import save_tiny

pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
Exact = list[dict[int, float]]


def prompts() -> list[list[int]]:
    """Awkward lengths; the last three share a prefix with the one before."""
    rng = random.Random(2)
    made = [[rng.randrange(3, 250) for _ in range(n)] for n in (1, 3, 16, 17, 40, 70)]
    return made + [made[-1][:48] + [rng.randrange(3, 250) for _ in range(n)] for n in (1, 9, 30)]


def exact(llm: LLM, batch: list[list[int]]) -> list[Exact]:
    """Every log probability of every generated token, to the last bit."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], PARAMS)
    found = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append([{token: entry.logprob for token, entry in each.items()} for each in logprobs])
    return found


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "llama int8", "gemma2 int8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Exact]]:
    """(folder, what each prompt gives alone in one piece); int8: of the KV cache."""
    family, _, kv_dtype = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(f"{kv_dtype or 'auto'}-")
    save_tiny(folder, family)
    with load(folder, prefix_caching=False, threads=1) as llm:
        return folder, [exact(llm, [prompt])[0] for prompt in prompts()]


def load(folder: Path, **options: Any) -> LLM:
    """The native platform in float32 with small blocks."""
    options = {"block_size": 4, "kv_memory": "16MiB", "kv_dtype": folder.name.partition("-")[0], **options}
    return LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(threads=1),
        dict(threads=2),
        dict(max_num_batched_tokens=5),
        dict(max_num_batched_tokens=37, threads=3),
        dict(prefix_caching=False, max_num_seqs=3),
        dict(block_size=16),
    ],
    ids=str,
)
def test_in_any_batch_and_chunking(checkpoint: tuple[Path, list[Exact]], options: dict[str, Any]) -> None:
    folder, alone = checkpoint
    with load(folder, **options) as llm:
        assert exact(llm, prompts()) == alone
        again = exact(llm, prompts())  # with prefix hits now
        assert again == alone


def test_after_preemption(checkpoint: tuple[Path, list[Exact]]) -> None:
    folder, alone = checkpoint
    with load(folder, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=32) as llm:
        room = llm.built.capacity.kv.total_bytes
    with load(folder, max_model_len=128, max_num_batched_tokens=32, kv_memory=str(int(room * 1.6))) as llm:
        assert exact(llm, prompts()) == alone
        assert llm.built.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_prefix_that_all_read_together(tmp_path: Path, kv_dtype: str, threads: int) -> None:
    """More positions than attention sums at once, so that those of the prefix are tasks of all requests."""
    folder = tmp_path / f"{kv_dtype}-"
    save_tiny(folder, "llama", max_position_embeddings=600)
    rng = random.Random(3)
    prefix = [rng.randrange(3, 250) for _ in range(520)]
    batch = [
        prefix[:kept] + [rng.randrange(3, 250) for _ in range(n)]
        for kept, n in ((520, 1), (520, 9), (300, 2), (520, 30))
    ]
    with load(folder, prefix_caching=False, threads=1) as llm:
        alone = [exact(llm, [prompt])[0] for prompt in batch]
    with load(folder, threads=threads) as llm:
        assert exact(llm, batch) == alone
        assert exact(llm, batch) == alone  # with prefix hits from the first step on
