"""/v1/embeddings, score, rerank and classify, against transformers and the Python API."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import processors

from headrace import LLM, PoolingParams
from live_server import LiveServer
from tiny_tokenizers import CORPUS, train_byte_level

TEXTS = ["one fox", "two dogs", "caf\u00e9s and na\u00efve r\u00e9sum\u00e9s"]


def save_classifier(folder: Path, num_labels: int) -> tuple[Any, Any]:
    """A tiny classifier of transformers with every weight random, and its tokenizer."""
    import transformers

    library: Any = transformers
    tokenizer = train_byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    config = library.BertConfig(
        vocab_size=480, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=num_labels,
    )  # fmt: skip
    torch.manual_seed(5)
    model = library.BertForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.15))
    model.save_pretrained(folder)
    return model.eval().requires_grad_(False), fast


@pytest.fixture(scope="module")
def embedder(model_folder: Path) -> Iterator[tuple[LiveServer, LLM]]:
    """A decoder that embeds by its last token, served and in this process."""
    options: dict[str, Any] = dict(device="reference", load_format="dummy", kv_memory="16MiB", pooling="last")
    arguments = ["--kv-memory", "16MiB", "--load-format", "dummy"]
    with LiveServer(model_folder, *arguments, device="reference", env={"HEADRACE_POOLING": "last"}) as server:
        with LLM(str(model_folder), **options) as llm:
            yield server, llm


def test_the_log_proposes_a_request_that_works(embedder: tuple[LiveServer, LLM]) -> None:
    answer = embedder[0].follow_example()
    assert answer.status_code == 200 and answer.json()["data"][0]["embedding"], answer.text


def test_embeddings_through_the_client(embedder: tuple[LiveServer, LLM]) -> None:
    server, llm = embedder
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wanted = [output.embedding for output in llm.embed(TEXTS)]
        for encoding in ("float", "base64", None):  # the client asks for base64 by itself, and decodes it
            options: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
            found = client.embeddings.create(model="tiny", input=TEXTS, **options)
            assert [entry.index for entry in found.data] == [0, 1, 2]
            for entry, vector in zip(found.data, wanted, strict=True):
                values = entry.embedding
                if encoding == "base64":
                    import base64

                    values = np.frombuffer(base64.b64decode(str(values)), np.float32).tolist()
                assert values == pytest.approx(vector.tolist(), abs=1e-5)
        ids = [llm.tokenizer.encode(text) for text in TEXTS]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        by_ids = client.embeddings.create(model="tiny", input=ids, dimensions=10)
        short = [output.embedding for output in llm.embed(TEXTS, PoolingParams(dimensions=10))]
        for entry, vector in zip(by_ids.data, short, strict=True):
            assert entry.embedding == pytest.approx(vector.tolist(), abs=1e-5)
        single = client.embeddings.create(model="tiny", input=ids[0])
        assert single.data[0].embedding == pytest.approx(wanted[0].tolist(), abs=1e-5)
        for options in ({"dimensions": 10_000}, {"extra_body": {"prompt_name": "nope"}}):
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="tiny", input="x", **options)
        wrong: list[Any] = [[], "", [[]], [["a"]], [[1, "a"]], [[[1]]], [True], [-1], [2**70]]
        for given in wrong:
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="tiny", input=given)
        with pytest.raises(openai.NotFoundError, match="makes vectors"):
            client.completions.create(model="tiny", prompt="x")
    server.wait_idle()


def test_scores_and_ranks_are_cosines(embedder: tuple[LiveServer, LLM]) -> None:
    server, llm = embedder
    wanted = [output.score for output in llm.score("fox", TEXTS)]
    found = server.post("/v1/score", {"text_1": "fox", "text_2": TEXTS}).json()
    assert [entry["score"] for entry in found["data"]] == pytest.approx(wanted, abs=1e-5)
    order = sorted(range(3), key=lambda index: -wanted[index])
    body = {"query": "fox", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    ranked = server.post("/v1/rerank", {**body, "top_n": 2}).json()["results"]
    assert [entry["index"] for entry in ranked] == order[:2]
    assert ranked[0]["document"] == {"text": TEXTS[order[0]]}
    for also in ("/rerank", "/v2/rerank"):
        again = server.post(also, {**body, "top_n": 2}).json()["results"]
        assert [entry["index"] for entry in again] == order[:2]
    again = server.post("/score", {"text_1": "fox", "text_2": TEXTS}).json()["data"]
    assert [entry["score"] for entry in again] == pytest.approx(wanted, abs=1e-5)
    assert "embeddings" in server.post("/classify", {"input": "x"}).json()["error"]["message"]
    bare = server.post("/v1/rerank", {**body, "return_documents": False}).json()["results"]
    assert len(bare) == 3 and "document" not in bare[0]
    assert server.post("/v1/score", {"text_1": ["a", "b"], "text_2": TEXTS}).status_code == 400
    assert server.post("/v1/rerank", {"query": "x", "documents": [{"title": "y"}]}).status_code == 400
    assert server.post("/v1/rerank", {"query": "x", "documents": []}).status_code == 400
    refused = server.post("/v1/classify", {"input": "x"})
    assert refused.status_code == 404 and "embeddings" in refused.json()["error"]["message"]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_and_cross_encoders_are_those_of_transformers(num_labels: int, tmp_path: Path) -> None:
    model, fast = save_classifier(tmp_path / "labels", num_labels)
    with LiveServer(tmp_path / "labels", device="reference") as server:
        assert server.follow_example().status_code == 200
        for route in ("/v1/chat/completions", "/v1/messages"):
            refused = server.post(route, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5})
            assert refused.status_code == 404 and "makes vectors" in refused.json()["error"]["message"]
        inputs = [fast(text, return_tensors="pt") for text in CORPUS[:2]]
        logits = torch.cat([model(**each).logits for each in inputs])
        expected = (logits.sigmoid() if num_labels == 1 else logits.softmax(-1)).numpy()
        body = {"input": CORPUS[:2], "truncate_prompt_tokens": -1}
        found = server.post("/v1/classify", body).json()["data"]
        for entry, probs in zip(found, expected, strict=True):
            assert entry["probs"] == pytest.approx(probs.tolist(), abs=1e-4)
            assert (entry["label"], entry["num_classes"]) == (f"LABEL_{probs.argmax()}", num_labels)
        ask = {"query": "fox", "documents": ["a fox", "dogs"]}
        ranked = server.post("/v1/rerank", ask)
        if num_labels == 3:
            assert ranked.status_code == 404 and "3 classes" in ranked.json()["error"]["message"]
            return
        pairs = [fast("fox", text, return_tensors="pt", return_token_type_ids=True) for text in ask["documents"]]
        scores = {i: float(model(**each).logits.sigmoid()[0, 0]) for i, each in enumerate(pairs)}
        got = {entry["index"]: entry["relevance_score"] for entry in ranked.json()["results"]}
        assert got == pytest.approx(scores, abs=1e-4)
