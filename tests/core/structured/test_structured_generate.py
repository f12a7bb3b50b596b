"""Structured output through LLM.generate, with random weights: every output is valid, whatever else is asked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams, StructuredOutputParams
from headrace.core.errors import RequestError
from tiny_checkpoints import save_tiny
from tiny_tokenizers import train_byte_level

EOS, VOCAB = 2, 500
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    save_tiny(folder, "llama", vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=1024)
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="reference", dtype="float32", max_num_seqs=16, max_num_batched_tokens=64) as llm:
        yield llm


def form(kind: Any, value: Any = None) -> StructuredOutputParams:
    return StructuredOutputParams(kind=kind, value=value)


def one(llm: LLM, **params: Any) -> Any:
    [output] = llm.generate("The dog", SamplingParams(**params))
    return output.outputs[0]


SCHEMAS: list[Any] = [
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["fox", "dog", None]},
            "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                      "additionalProperties": False},
        },
        "required": ["name", "kind", "inner"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "null"}, {"const": {"a": [1, 2]}}]},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_outputs_keep_to_their_schemas(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=300, structured_output=form("json_schema", schema)
        )
        for schema in SCHEMAS
        for seed in range(4)
    ]
    outputs = llm.generate(["The dog"] * len(params), params)
    for each, output in zip(params, outputs, strict=True):
        assert each.structured_output is not None
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), each.structured_output.value)
    llm.built.engine.scheduler.check_integrity()


def test_any_json_object_patterns_and_choices(llm: LLM) -> None:
    texts = ["yes", "yes, no", "\u00e9t\u00e9"]
    closing = {llm.tokenizer.encode(char, add_special_tokens=False)[0]: 20.0 for char in '"}]'}
    for seed in range(5):
        common: dict[str, Any] = dict(temperature=2.0, seed=seed, max_tokens=400)
        outcome = one(llm, structured_output=form("json_object"), logit_bias=closing, **common)
        assert isinstance(json.loads(outcome.text), dict) and outcome.finish_reason == "stop"
        assert re.fullmatch(
            "(fox|dog)+ [0-9]{2}", one(llm, structured_output=form("regex", "(fox|dog){1,9} [0-9]{2}"), **common).text
        )
        assert one(llm, structured_output=form("choice", texts), **common).text in texts
        assert one(llm, structured_output=form("grammar", 'start: "a" | "bc"'), **common).text in ("a", "bc")


def test_ends_with_the_closing_brace(llm: LLM) -> None:
    outcome = one(llm, temperature=0, structured_output=form("json_schema", SCHEMAS[1]), max_tokens=300)
    assert outcome.text.endswith("}") and outcome.finish_reason == "stop" and outcome.stop_reason is None
    assert outcome.token_ids[-1] == EOS


def test_greedy_equals_masking_by_brute_force(llm: LLM, folder: Path) -> None:
    """Up to 8 of a few characters: which tokens are allowed is tried one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pattern = "[a-h ]{0,8}"
    prompt = llm.tokenizer.encode("The dog")
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        text = "".join(llm.tokenizer.token_text(token) for token in tokens)
        allowed = [
            token
            for token in range(3, VOCAB)
            if (own := llm.tokenizer.token_text(token)) and re.fullmatch(pattern, text + own)
        ]
        allowed.append(EOS)
        tokens.append(max(allowed, key=lambda token: float(logits[token])))
    outcome = one(llm, temperature=0, structured_output=form("regex", pattern), max_tokens=50)
    assert outcome.token_ids == tokens


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {
            "n": st.integers(1, 3),
            "temperature": st.sampled_from([0.0, 1.0, 3.0]),
            "seed": st.integers(0, 99),
            "logprobs": st.none() | st.integers(0, 3),
            "presence_penalty": st.sampled_from([0.0, 2.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
            "ignore_eos": st.booleans(),
            "min_tokens": st.sampled_from([0, 6, 100]),
            "top_k": st.sampled_from([0, 3]),
            "stop": st.sampled_from([(), ("longer than a name",)]),
            "stop_token_ids": st.sampled_from([(), (1,)]),
        }
    ),
    st.sampled_from([SCHEMAS[2], {"type": "integer", "minimum": -5, "maximum": 500}]),
)
def test_works_together_with_all_else(llm: LLM, more: dict[str, Any], schema: Any) -> None:
    params = SamplingParams(max_tokens=400, structured_output=form("json_schema", schema), **more)
    [output] = llm.generate("The dog", params)
    for outcome in output.outputs:
        assert outcome.finish_reason == "stop"
        jsonschema.validate(json.loads(outcome.text), schema)
        if params.logprobs is not None:
            assert outcome.logprobs is not None and len(outcome.logprobs) == len(outcome.token_ids)


def test_ends_are_put_off_only_as_far_as_the_grammar_goes(llm: LLM) -> None:
    pattern = form("regex", "a{1,5}")
    for more in (dict(ignore_eos=True), dict(min_tokens=100, max_tokens=200)):
        assert one(llm, temperature=0, structured_output=pattern, **more).text == "aaaaa"
    assert (
        one(llm, temperature=0, structured_output=form("regex", "a+"), ignore_eos=True, max_tokens=7).text[:5]
        == "aaaaa"
    )


def test_stop_strings_and_lengths_cut_the_text(llm: LLM) -> None:
    pattern = form("regex", "(abc ){50}")
    outcome = one(llm, temperature=0, structured_output=pattern, stop=["c a"], max_tokens=200)
    assert (outcome.text, outcome.stop_reason) == ("ab", "c a")
    outcome = one(llm, temperature=0, structured_output=pattern, max_tokens=3)
    assert outcome.finish_reason == "length" and len(outcome.token_ids) == 3


def test_allowed_token_ids_narrow_the_grammar(llm: LLM) -> None:
    a, b = (llm.tokenizer.encode(char, add_special_tokens=False)[0] for char in "ab")
    outcome = one(llm, temperature=0, structured_output=form("regex", "[ab]{4}"), allowed_token_ids=[b])
    assert outcome.text == "bbbb" and outcome.finish_reason == "stop"
    assert a != b


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda b: dict(allowed_token_ids=[b]), "allowed_token_ids leaves no token"),
        (lambda b: dict(logit_bias={b - 1: float("-inf")}), "was sampled although the grammar does not allow it"),
    ],
)
def test_a_request_that_contradicts_itself_fails_alone(llm: LLM, more: Any, message: str) -> None:
    [b] = llm.tokenizer.encode("b", add_special_tokens=False)
    wrong = SamplingParams(temperature=0, structured_output=form("regex", "a{9}"), max_tokens=20, **more(b))
    right = SamplingParams(temperature=0, structured_output=form("regex", "a{9}"), max_tokens=20)
    outputs = llm.generate(["The dog"] * 3, [right, wrong, right])
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert message in outputs[1].error and outputs[0].outputs[0].text == "aaaaaaaaa"
    assert outputs[1].outputs[0].text == ""
    llm.built.engine.scheduler.check_integrity()


def test_preemption_takes_the_grammar_up_where_it_was(folder: Path) -> None:
    common: dict[str, Any] = dict(device="reference", dtype="float32", block_size=4, max_model_len=64)
    pattern = form("regex", "(ab|[c-f]){30}")
    params = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=56, structured_output=pattern) for seed in range(4)
    ]

    def texts(**options: Any) -> tuple[list[str], int, int]:
        with LLM(str(folder), **common, **options) as llm:
            outputs = llm.generate(["The dog"] * len(params), params)
            scheduler, kv = llm.built.engine.scheduler, llm.built.capacity.kv
            return [output.outputs[0].text for output in outputs], scheduler.num_preemptions, kv.total_bytes

    alone, none, room = texts(max_num_seqs=1)
    together, many, _ = texts(kv_memory=str(int(room * 1.3)), max_num_seqs=4)
    assert (none, many > 0) == (0, True)
    assert together == alone
    assert all(re.fullmatch("(ab|[c-f]){30}", text) for text in together)


def test_wrong_schemas_are_refused_before_anything_is_queued(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match="Invalid type: nope") as caught:
        one(llm, structured_output=form("json_schema", {"type": "nope"}))
    assert caught.value.code == "invalid_structured_output" and not llm.built.engine.has_unfinished()
    with LLM(str(folder), device="reference", skip_tokenizer_init=True, max_model_len=64) as blind:
        with pytest.raises(RequestError, match="structured output needs a tokenizer"):
            blind.generate({"prompt_token_ids": [5]}, SamplingParams(structured_output=form("json_object")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "yaml"}, "no kind 'yaml'"),
        ({"kind": "json_object", "value": 1}, "takes no value"),
        ({"kind": "choice", "value": []}, "one text or more"),
        ({"kind": "choice", "value": "yes"}, "one text or more"),
        ({"kind": "regex", "value": ""}, "regex must be a text"),
        ({"kind": "json_schema", "value": [1]}, "must be an object"),
        ({"type": "json"}, "kind and value"),
        ("json", "must be StructuredOutputParams"),
    ],
)
def test_wrong_parameters(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_output=value)
    right = SamplingParams(structured_output={"kind": "choice", "value": ["a"]})  # type: ignore[arg-type]
    assert right.structured_output == form("choice", ("a",))


FORCED: list[Any] = [
    {"kind": "json_schema", "value": SCHEMAS[1]},
    {"kind": "choice", "value": ["The quick brown fox jumps over the lazy dog", "The quick red fox sleeps", "No"]},
    {"kind": "regex", "value": "Dear (fox|dog), the weather of [a-c]{1,2} is fine\\."},
    {"kind": "grammar", "value": 'start: "{" X "}" | "[" X "]"\nX: /a long text that is always the same: [0-9]/'},
]


@pytest.mark.parametrize("asked", FORCED)
@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.5}])
def test_forced_tokens_take_no_step_and_change_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, asked: Any, more: Any
) -> None:
    """A step for each token gives the same tokens as steps that skip those which the grammar forces."""
    steps: list[int] = []
    submit = llm.built.engine.executor.submit

    def counted(plan: Any) -> Any:
        steps.append(plan.step)
        return submit(plan)

    monkeypatch.setattr(llm.built.engine.executor, "submit", counted)
    params: Any = dict(structured_output=StructuredOutputParams(**asked), max_tokens=40) | more
    found = []
    for limit in (0, 256):
        monkeypatch.setattr("headrace.core.runner.runner.MAX_FORCED_TOKENS", limit)
        steps.clear()
        [output] = llm.generate("The dog", SamplingParams(**params))
        found.append(([(o.token_ids, o.text, o.finish_reason) for o in output.outputs], len(steps)))
    assert found[0][0] == found[1][0]
    num_tokens = len(found[0][0][0][0])
    assert found[0][1] == num_tokens
    assert found[1][1] < num_tokens * (0.9 if asked["kind"] == "json_schema" else 0.6)


def test_forced_tokens_end_where_a_request_says(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    params: list[Any] = [
        dict(max_tokens=5),
        dict(stop=["fox"]),
        dict(logprobs=1),
        dict(logit_bias={"5": 100.0}),
        dict(stop_token_ids=[llm.tokenizer.encode(" fox", add_special_tokens=False)[-1]]),
        dict(ignore_eos=True),
    ]
    for more in params:
        both = []
        for limit in (256, 0):
            monkeypatch.setattr("headrace.core.runner.runner.MAX_FORCED_TOKENS", limit)
            output = one(llm, structured_output=form("choice", [text]), temperature=0, **more)
            both.append((output.token_ids, output.text, output.finish_reason, output.stop_reason))
            assert len(output.logprobs or output.token_ids) == len(output.token_ids)
        assert both[0] == both[1], more
