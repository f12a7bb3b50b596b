"""LLM as users see it, on a tiny random Llama with a real tokenizer: parameters, errors, streams, pressure."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, HeadraceError, RequestOutput, SamplingParams
from headrace.core.clock import VirtualClock
from headrace.core.engine.executor import StepFuture
from headrace.core.errors import CapacityError, ConfigError, ModelError, ModelNotFound, RequestError
from headrace.core.stages import Plan
from tiny_checkpoints import greedy_tokens, save_tiny
from tiny_tokenizers import train_byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A Llama of two layers with a byte-level tokenizer, as a hub folder."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = train_byte_level()
    model = save_tiny(
        folder, "llama", vocab_size=480, num_hidden_layers=2, max_position_embeddings=512, eos_token_id=0
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, model


def load(folder: Path, **options: Any) -> LLM:
    """The model on the reference platform in float32."""
    return LLM(str(folder), dtype="float32", **{"device": "reference", "kv_memory": "32MiB", **options})


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with load(checkpoint[0]) as loaded:
        yield loaded


def free_blocks(llm: LLM) -> None:
    """Nothing may be left of finished or aborted requests."""
    scheduler = llm.built.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.kv_usage().slots_allocated == 0


def test_the_first_step_is_no_queueing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.built.engine
    clock, submit = VirtualClock(), engine.executor.submit

    def slow_submit(plan: Plan) -> StepFuture:
        clock.advance(8.0)
        return submit(plan)

    monkeypatch.setattr(engine, "clock", clock)
    monkeypatch.setattr(engine.executor, "submit", slow_submit)
    engine.add("slow", [1, 2, 3], SamplingParams(max_tokens=2))
    clock.advance(1.0)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    timings = outputs[-1].timings
    assert timings is not None
    times = timings.arrival_s, timings.scheduled_s, timings.first_token_s, timings.finished_s
    assert times == (0.0, 1.0, 9.0, 17.0)


def test_text_prompt_equals_transformers(llm: LLM, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    prompt = "The quick brown fox"
    output = llm.generate(prompt, LONG)[0]
    assert output.prompt == prompt and output.finished
    assert output.prompt_token_ids == train_byte_level().encode(prompt).ids
    assert output.outputs[0].token_ids == greedy_tokens(checkpoint[1], output.prompt_token_ids, 20)
    assert output.outputs[0].text == train_byte_level().decode(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "length"
    free_blocks(llm)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "The quick brown fox jumps", "hello world " * 9]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]


def test_seeded_requests_are_the_same_alone_and_together(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=s, max_tokens=15, ignore_eos=True) for s in range(6)]
    prompts = ["Hello", "The dog", "def main", "x", "Hello", "The lazy"]
    together = llm.generate(prompts, params)
    for prompt, each, expected in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, each)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert together[0].outputs[0].token_ids != together[4].outputs[0].token_ids


def test_n_gives_different_completions_that_can_be_repeated(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("The quick", params)[0] for _ in range(2))
    texts = [completion.token_ids for completion in first.outputs]
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    assert len({tuple(text) for text in texts}) == 3
    assert texts == [completion.token_ids for completion in again.outputs]
    free_blocks(llm)


def test_stop_string_ends_at_its_first_occurrence(llm: LLM) -> None:
    whole = llm.generate("The quick", LONG)[0].outputs[0].text
    for start in range(3, len(whole) - 3, 4):
        stop = whole[start : start + 3]
        output = llm.generate("The quick", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop))
        completion = output[0].outputs[0]
        assert completion.text == whole[: whole.index(stop)]
        assert completion.finish_reason == "stop" and completion.stop_reason == stop
    free_blocks(llm)


def test_stop_token_is_reported_and_not_in_the_text(llm: LLM) -> None:
    tokens = llm.generate("The quick", LONG)[0].outputs[0].token_ids
    stop = tokens[7]
    count = tokens.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    completion = llm.generate("The quick", params)[0].outputs[0]
    assert completion.token_ids == tokens[:count]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == train_byte_level().decode(tokens[: count - 1])


def test_logprobs_sum_up(llm: LLM, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4, ignore_eos=True)
    output = llm.generate("Hello", params)[0]
    completion = output.outputs[0]
    ids = output.prompt_token_ids + completion.token_ids
    with torch.inference_mode():
        expected = checkpoint[1](torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    total = 0.0
    for position, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(output.prompt_token_ids) - 1 + position]
        assert entry[token].rank == 1 and len(entry) == 4
        assert bytes(entry[token].bytes) == llm.tokenizer.token_bytes(token)
        for candidate, value in entry.items():
            assert value.logprob == pytest.approx(row[candidate].item(), abs=1e-3)
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_streams_may_be_read_in_turns_and_left_early(llm: LLM) -> None:
    whole = [llm.generate(prompt, LONG)[0].outputs[0].text for prompt in ("Hello", "The dog")]
    streams = [llm.stream(prompt, LONG) for prompt in ("Hello", "The dog")]
    seen: list[list[RequestOutput]] = [[], []]
    for _ in range(20):
        for stream, outputs in zip(streams, seen, strict=True):
            output = next(stream, None)
            if output is not None:
                outputs.append(output)
    for outputs, text in zip(seen, whole, strict=True):
        assert outputs[-1].finished and outputs[-1].outputs[0].text == text
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
    early = llm.stream("Hello", LONG)
    next(early)
    early.close()  # type: ignore[attr-defined]
    free_blocks(llm)


def test_a_stream_that_nobody_reads_ends(llm: LLM) -> None:
    stream = llm.stream("Hello", LONG)
    assert llm.built.engine.has_unfinished()
    del stream
    free_blocks(llm)


def test_what_runs_in_a_step_cannot_call_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither garbage, a stream among it, nor a callback."""
    engine = llm.built.engine
    runner = engine.executor._runner.runner  # type: ignore[attr-defined]
    step, abort = runner.step, engine.abort
    left = [llm.stream("The dog", LONG)]
    next(left[0])
    seen: list[str] = []

    def stepped(batch: Any) -> Any:
        seen.append("step")
        left.clear()  # as the collector does, whenever it likes
        for call in (lambda: llm.generate("Hi", LONG), lambda: llm.stream("Hi"), llm.close):
            with pytest.raises(RequestError, match="in the midst of a step"):
                call()
        seen.append("stepped")
        return step(batch)

    def aborted(request_id: str) -> None:
        seen.append("abort")
        abort(request_id)

    monkeypatch.setattr(runner, "step", stepped)
    monkeypatch.setattr(engine, "abort", aborted)
    [output] = llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    assert seen[:3] == ["step", "stepped", "abort"] and seen.count("abort") == 1
    monkeypatch.undo()
    free_blocks(llm)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=3))[0]
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[0] == 1, "special tokens of the template are one token each"


def test_max_tokens_zero_scores_the_prompt(llm: LLM) -> None:
    output = llm.generate("The quick brown", SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and all(entry for entry in output.prompt_logprobs[1:])


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", LONG, "empty_prompt"),
        ({"prompt_token_ids": []}, LONG, "empty_prompt"),
        ("word " * 600, LONG, "context_length_exceeded"),
        ({"prompt_token_ids": [5, 480]}, LONG, "invalid_request"),
        ({"prompt_token_ids": [-1]}, LONG, "invalid_request"),
        ({"tokens": [1]}, LONG, "invalid_request"),
        ("Hi", SamplingParams(logprobs=21), "invalid_sampling_params"),
        ("Hi", SamplingParams(logit_bias={480: 1.0}), "invalid_request"),
        ("Hi", SamplingParams(logits_processors=["nope"]), "unknown_logits_processor"),
    ],
)
def test_bad_requests_say_why_and_harm_nothing(llm: LLM, prompt: Any, params: SamplingParams, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], params)
    assert caught.value.code in (code, "invalid_sampling_params")
    with pytest.raises(RequestError, match="a prompt is text or has prompt or prompt_token_ids, got int"):
        llm.generate([5, 6])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="prompt 1 of 2"):
        llm.generate(["fine", prompt], [LONG, params])
    free_blocks(llm)


def test_interrupt_leaves_the_model_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("Hello", LONG)[0].outputs[0].token_ids
    runner = llm.built.engine.executor._runner.runner  # type: ignore[attr-defined]
    step, calls = runner.step, iter(range(100))

    def interrupted(batch: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step(batch)

    monkeypatch.setattr(runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "The dog"], LONG)
    free_blocks(llm)
    assert llm.generate("Hello", LONG)[0].outputs[0].token_ids == expected


def test_a_thousand_requests_in_a_pool_for_twenty(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """All finish, all equal to running alone with the same seed, nothing leaks."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 480) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(0, 14)] + [rng.randrange(3, 480) for _ in range(rng.randrange(1, 10))]
        for _ in range(1000)
    ]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.randrange(1, 24), ignore_eos=True)
        for i in range(1000)
    ]
    options = dict(device="cpu", skip_tokenizer_init=True, block_size=2, max_model_len=48)
    with load(checkpoint[0], max_num_seqs=1, **options) as alone:
        each = alone.built.capacity.kv.total_bytes
    with load(checkpoint[0], max_num_seqs=256, kv_memory=str(each * 20), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        free_blocks(llm)
        assert llm.built.engine.scheduler.num_preemptions > 0
    with load(checkpoint[0], max_num_seqs=64, prefix_caching=False, **options) as roomy:
        for i in rng.sample(range(1000), 60):
            expected = roomy.generate({"prompt_token_ids": prompts[i]}, params[i])[0].outputs[0].token_ids
            assert outputs[i].outputs[0].token_ids == expected, i
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]


def test_closed_model_says_so(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    llm = load(checkpoint[0])
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("Hello", LONG)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(max_model_len=513), ConfigError, "512 positions"),
        (dict(kv_memory="1KiB"), CapacityError, "does not fit"),
        (dict(kv_memory="900TiB"), CapacityError, "does not fit"),
        (dict(kv_memory="64KiB", max_model_len=512), CapacityError, "max-model-len"),
        (dict(max_modle_len=5), ConfigError, "did you mean max_model_len"),
        (dict(block_size=3), ConfigError, "power of two"),
        (dict(dtype="int7"), ConfigError, "one of"),
        (dict(policy="lifo"), ConfigError, "fcfs"),
    ],
)
def test_bad_options_say_what_would_work(
    checkpoint: tuple[Path, PreTrainedModel], options: dict[str, Any], error: type[HeadraceError], text: str
) -> None:
    with pytest.raises(error, match=text):
        LLM(str(checkpoint[0]), **{"device": "reference", **options}).close()


def test_auto_length_shrinks_to_the_memory(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    with load(checkpoint[0], kv_memory="100KiB") as llm:
        assert 16 <= llm.max_model_len < 512
        assert "shortened from 512" in llm.built.capacity.reason


def test_tokenizer_of_another_model_is_refused(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=100, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint[0] / name).read_bytes())
    with pytest.raises(ModelError, match="do not belong together"):
        load(tmp_path)


def test_unknown_family_lists_near_names(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(ModelError, match="llama"):
        load(tmp_path)


def test_folder_without_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load(tmp_path)
