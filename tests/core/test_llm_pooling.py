"""Embeddings, classes and scores through the whole engine, against transformers on tiny random checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
from tokenizers import processors

from headrace import LLM, PoolingParams
from headrace.core.errors import ConfigError, ModelError, RequestError
from tiny_tokenizers import CORPUS, train_byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

AnyFloats = npt.NDArray[np.floating[Any]]
TINY: dict[str, Any] = dict(
    vocab_size=500, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DECODER: dict[str, Any] = dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
OPTIONS: dict[str, Any] = dict(device="reference", dtype="float32")
LENGTHS = (23, 1, 40, 9, 17, 33)
TOLERANCE = 2e-5


# ---- embeddings -----------------------------------------------------------------------------------------------
def test_embeddings_of_an_encoder_are_means_of_its_hidden_states(tmp_path: Path) -> None:
    model, prompts = save(tmp_path, "AutoModel", "bert"), make_prompts()
    expected = [hidden_states(model, ids).mean(0).numpy() for ids in prompts]
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=64, max_num_seqs=3, **OPTIONS) as llm:
        together = [output.embedding for output in llm.embed(as_ids(prompts))]
        alone = [llm.embed(each)[0].embedding for each in as_ids(prompts)]
        assert llm.built.engine.scheduler.num_running == llm.built.engine.scheduler.num_waiting == 0
        llm.built.engine.scheduler.check_integrity()
    assert_equal(together, expected)
    assert_equal(alone, expected)


def test_a_step_grows_to_the_longest_text(tmp_path: Path) -> None:
    """No part of a text can be computed before the rest, so that a small budget must not refuse it."""
    model = save(tmp_path, "AutoModel", "bert")
    ids = make_prompts([60])[0]
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=8, **OPTIONS) as llm:
        got = llm.embed({"prompt_token_ids": ids})[0].embedding
    assert_equal([got], [hidden_states(model, ids).mean(0).numpy()])


@pytest.mark.parametrize(("mode", "has_old_keys"), [("cls", True), ("mean", False), ("lasttoken", True)])
def test_sentence_transformers_modules_are_read(mode: str, has_old_keys: bool, tmp_path: Path) -> None:
    model, prompts = save(tmp_path, "AutoModel", "bert"), make_prompts()
    dense: Any = torch.nn.Linear(64, 24)
    old = {"pooling_mode_lasttoken" if mode == "lasttoken" else f"pooling_mode_{mode}_token": True}
    write_modules(tmp_path, old if has_old_keys else {"pooling_mode": mode}, dense=dense, normalize=True)
    pick: Any = {"cls": lambda h: h[0], "mean": lambda h: h.mean(0), "lasttoken": lambda h: h[-1]}[mode]
    with torch.inference_mode():
        raw = [torch.tanh(dense(pick(hidden_states(model, ids)))).numpy() for ids in prompts]
    with LLM(str(tmp_path), skip_tokenizer_init=True, **OPTIONS) as llm:
        normal = [output.embedding for output in llm.embed(as_ids(prompts))]
        plain = [output.embedding for output in llm.embed(as_ids(prompts), PoolingParams(normalize=False))]
        short = [output.embedding for output in llm.embed(as_ids(prompts), PoolingParams(dimensions=10))]
    assert_equal(normal, [vector / np.linalg.norm(vector) for vector in raw])
    assert_equal(plain, raw)
    assert_equal(short, [vector[:10] / np.linalg.norm(vector[:10]) for vector in raw])


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"block_size": 4, "max_num_seqs": 2}],
    ids=["whole", "chunks", "few_seats"],
)
def test_a_decoder_gives_its_last_token(options: dict[str, Any], tmp_path: Path) -> None:
    """As Qwen3-Embedding does; in chunks, and again from the prefix cache."""
    model, prompts = save(tmp_path, "AutoModel", "qwen3", **DECODER), make_prompts()
    write_modules(tmp_path, {"pooling_mode": "lasttoken"}, normalize=True)
    expected = [vector / np.linalg.norm(vector) for vector in (hidden_states(model, p)[-1].numpy() for p in prompts)]
    with LLM(str(tmp_path), skip_tokenizer_init=True, **{"block_size": 4, **options}, **OPTIONS) as llm:
        for _ in range(2):
            assert_equal([output.embedding for output in llm.embed(as_ids(prompts))], expected)
        assert llm.built.engine.scheduler.num_hit_tokens > 0
        llm.built.engine.scheduler.check_integrity()


def test_any_decoder_embeds_if_asked_to(tmp_path: Path) -> None:
    model, prompts = save(tmp_path, "AutoModelForCausalLM", "llama", **DECODER), make_prompts()
    expected = [hidden_states(model.model, ids).mean(0).numpy() for ids in prompts]
    with LLM(str(tmp_path), skip_tokenizer_init=True, pooling="mean", max_num_batched_tokens=16, **OPTIONS) as llm:
        assert_equal([output.embedding for output in llm.embed(as_ids(prompts))], expected)


def test_the_null_platform_gives_zeros(tmp_path: Path) -> None:
    save(tmp_path, "AutoModel", "bert")
    prompts = as_ids(make_prompts()) * 20
    with LLM(str(tmp_path), skip_tokenizer_init=True, device="null", max_num_batched_tokens=64) as llm:
        outputs = llm.embed(prompts)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert all(output.embedding.shape == (64,) and not output.embedding.any() for output in outputs)


# ---- classes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model_type", ["bert", "qwen2"])
def test_probabilities_of_labels_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    sizes = {} if model_type == "bert" else {key: value for key, value in DECODER.items() if key != "head_dim"}
    names = {0: "bad", 1: "good", 2: "odd"}
    model = save(
        tmp_path, "AutoModelForSequenceClassification", model_type, **sizes, id2label=names,
        label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    prompts = make_prompts()
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits for ids in prompts])
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=64, **OPTIONS) as llm:
        outputs = llm.classify(as_ids(prompts))
        raw = llm.classify(as_ids(prompts), PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="cannot embed: it gives labels") as caught:
            llm.embed(as_ids(prompts))
        assert caught.value.code == "not_supported"
        with pytest.raises(RequestError, match="3 classes; scores come from"):
            llm.score("a", "b")
    assert_equal([np.array(output.probs) for output in outputs], list(logits.softmax(-1).numpy()))
    assert_equal([np.array(output.probs) for output in raw], list(logits.numpy()))
    assert [output.label for output in outputs] == [names[i] for i in logits.argmax(-1).tolist()]
    assert outputs[0].num_classes == 3 and outputs[0].labels == ("bad", "good", "odd")


@pytest.mark.parametrize(
    ("num_labels", "config", "function"),
    [
        (1, {}, lambda x: x.sigmoid()),
        (1, {"problem_type": "regression"}, lambda x: x),
        (2, {}, lambda x: x.softmax(-1)),
        (2, {"problem_type": "multi_label_classification"}, lambda x: x.sigmoid()),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_scores_are_made_as_the_config_says(
    num_labels: int, config: dict[str, Any], function: Any, tmp_path: Path
) -> None:
    model = save(tmp_path, "AutoModelForSequenceClassification", "bert", num_labels=num_labels)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    ids = make_prompts([12])[0]
    with torch.inference_mode():
        expected = function(model(torch.tensor([ids])).logits[0]).numpy()
    with LLM(str(tmp_path), skip_tokenizer_init=True, **OPTIONS) as llm:
        assert_equal([np.array(llm.classify({"prompt_token_ids": ids})[0].probs)], [expected])


# ---- scores of pairs ------------------------------------------------------------------------------------------
def test_a_cross_encoder_reads_pairs_as_transformers_does(tmp_path: Path) -> None:
    model = save(tmp_path, "AutoModelForSequenceClassification", "bert", num_labels=1)
    fast = fast_tokenizer()
    fast.save_pretrained(tmp_path)
    query, texts = CORPUS[4], [CORPUS[0], "", CORPUS[3] * 3, "short"]
    expected = []
    for text in texts:
        inputs = fast(
            [query], [text], truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=True
        )
        with torch.inference_mode():
            expected.append(model(**inputs).logits.sigmoid()[0].numpy())
    params = PoolingParams(truncate_prompt_tokens=-1)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_equal([np.array([output.score]) for output in llm.score(query, texts, params)], expected)
        one_each = llm.score([query] * len(texts), texts, params)
        assert_equal([np.array([output.score]) for output in one_each], expected)
        assert_equal([np.array(o.probs) for o in llm.classify([(query, text) for text in texts], params)], expected)
        with pytest.raises(RequestError, match=r"text 2 of 4: the text has \d+ tokens, and .* takes 64") as caught:
            llm.score(query, texts)
        assert caught.value.code == "context_length_exceeded" and "truncate_prompt_tokens=-1" in str(caught.value)
        with pytest.raises(RequestError, match="2 queries do not go with 3 documents"):
            llm.score(["a", "b"], ["a", "b", "c"])
        assert llm.score(query, []) == []


def test_an_embedding_model_scores_by_the_cosine(tmp_path: Path) -> None:
    save(tmp_path, "AutoModel", "bert")
    fast_tokenizer().save_pretrained(tmp_path)
    prompts = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        a, b = (output.embedding for output in llm.embed(["one fox", "two dogs"]))
        got = llm.score("one fox", ["two dogs", "one fox"])
        assert got[0].score == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)
        assert got[1].score == pytest.approx(1.0, abs=1e-6)
        asked = llm.embed("fox", PoolingParams(prompt_name="query"))[0].embedding
        assert_equal([asked], [llm.embed("find: fox")[0].embedding])
        with pytest.raises(RequestError, match="has no prompt 'quer'; it has query, document"):
            llm.embed("fox", PoolingParams(prompt_name="quer"))
        with pytest.raises(RequestError, match="dimensions 65 is more than the 64"):
            llm.embed("fox", PoolingParams(dimensions=65))
        with pytest.raises(RequestError, match="text 1 of 2: a text is a string, token ids or a pair"):
            llm.embed(["fox", ["a", "b", "c"]])
        assert llm.embed([]) == []


# ---- what cannot be done --------------------------------------------------------------------------------------
def test_what_a_model_cannot_do_is_said(tmp_path: Path) -> None:
    save(tmp_path / "encoder", "AutoModel", "bert")
    save(tmp_path / "decoder", "AutoModelForCausalLM", "llama", **DECODER)
    save(tmp_path / "classifier", "AutoModelForSequenceClassification", "bert")
    ids = {"prompt_token_ids": [5, 6]}
    with LLM(str(tmp_path / "encoder"), skip_tokenizer_init=True, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="makes vectors, not text") as caught:
            llm.generate({"prompt_token_ids": [5, 6]})
        assert caught.value.code == "not_supported"
        with pytest.raises(RequestError, match="cannot classify: it gives embeddings"):
            llm.classify(ids)
        with pytest.raises(RequestError, match="loaded without a tokenizer"):
            llm.embed("text")
        with pytest.raises(RequestError, match="token id 500 is outside the vocabulary"):
            llm.embed({"prompt_token_ids": [5, 500]})
        with pytest.raises(RequestError, match="the text is empty"):
            llm.embed({"prompt_token_ids": []})
        with pytest.raises(RequestError, match="got the keys tokens"):
            llm.embed({"tokens": [1]})
        assert len(llm.embed(ids)) == 1  # nothing of the above is left behind
    with LLM(str(tmp_path / "decoder"), skip_tokenizer_init=True, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="cannot embed: it generates text") as caught:
            llm.embed(ids)
        assert caught.value.code == "not_supported" and "--pooling last" in str(caught.value)
    with pytest.raises(ConfigError, match="pooling mean makes embeddings, but this model is a classifier"):
        LLM(str(tmp_path / "classifier"), pooling="mean", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": {"a": 1}}, "modules.json must hold a JSON list"),
        ({"modules": [3]}, "must list objects with a type, got 3"),
        ({"modules": [{"type": "sentence_transformers.models.CNN", "path": ""}]}, "lists a module 'CNN'"),
        (
            {"modules": [{"type": "x.Pooling", "path": "../1_Pooling"}]},
            "folders beside it, got the path '../1_Pooling'",
        ),
        ({"modules": [{"type": "x.Pooling", "path": "/etc"}]}, "folders beside it, got the path '/etc'"),
        ({"modules": [{"type": "x.Pooling", "path": 7}]}, "folders beside it, got the path 7"),
        ({"pooling": {"pooling_mode": ["mean", "max"]}}, "pools by mean and max; served are mean, cls, lasttoken"),
        ({"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "leaves prompts out"),
        ({"dense": {"in_features": 63, "out_features": 4}}, "takes 63 values, but the layer before gives 64"),
        ({"dense": {"in_features": 64, "out_features": 4, "activation_function": "x.Mish"}}, "activation 'Mish'"),
        ({"dense": None}, "2_Dense.config.json is missing"),
        ({"prompts": {"prompts": {"a": "b"}, "default_prompt_name": "c"}}, "default_prompt_name 'c', but only"),
    ],
)
def test_modules_that_cannot_be_served_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {**TINY, "model_type": "bert", "architectures": ["BertModel"]}  # no weight is read before the error
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_modules(tmp_path, {"pooling_mode": "mean"}, dense=torch.nn.Linear(64, 4))
    files = {
        "modules": "modules.json", "pooling": "1_Pooling/config.json", "dense": "2_Dense/config.json",
        "prompts": "config_sentence_transformers.json",
    }  # fmt: skip
    for name, value in change.items():
        path = tmp_path / files[name]
        path.unlink() if value is None else path.write_text(json.dumps(value))
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True, **OPTIONS)


def test_pooling_params_are_checked() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"dimensions": 0}, {"dimensions": 1.5}, {"dimensions": True}, {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": "all"}, {"normalize": 1},
        {"use_activation": None}, {"prompt_name": 3},
    )  # fmt: skip
    for wrong in cases:
        with pytest.raises(RequestError) as caught:
            PoolingParams(**wrong)
        assert caught.value.code == "invalid_pooling_params" and next(iter(wrong)) in str(caught.value)


# ---- their side -----------------------------------------------------------------------------------------------
def save(folder: Path, auto: str, model_type: str, **sizes: Any) -> Any:
    """A tiny model of transformers with every weight random, saved in `folder`."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **sizes})
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        scale = 0.2 if parameter.dim() == 1 else 0.5 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(is_norm + scale * noise)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    return model.eval().requires_grad_(False)


def hidden_states(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """After the last layer, [num_tokens, hidden_size]."""
    result: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return result


def write_modules(
    folder: Path, pooling: dict[str, Any], *, dense: torch.nn.Linear | None = None, normalize: bool = False
) -> None:
    """Files as sentence-transformers writes them."""
    from safetensors.torch import save_file

    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    if dense is not None:
        modules.append(("Dense", "2_Dense"))
        config = {
            "in_features": dense.in_features, "out_features": dense.out_features, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }  # fmt: skip
        (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
        tensors = {"linear.weight": dense.weight.data, "linear.bias": dense.bias.data}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append(("Normalize", "3_Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def fast_tokenizer() -> Any:
    """The tokenizer below in transformers."""
    import transformers

    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=pair_tokenizer(), pad_token="<|endoftext|>")


def pair_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE that puts special tokens around a text and between two, and tells their types."""
    tokenizer = train_byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    return tokenizer


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random token ids without the padding token."""
    random = np.random.default_rng(3)
    return [random.integers(3, 480, length).tolist() for length in lengths]


def as_ids(prompts: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    """Prompts that need no tokenizer."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def assert_equal(got: Sequence[AnyFloats], want: Sequence[AnyFloats]) -> None:
    """All values within TOLERANCE of the largest one."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() < TOLERANCE * max(1.0, np.abs(theirs).max())
