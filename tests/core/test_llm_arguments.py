"""Arguments of the Python API that are wrong: one error that names them, and the LLM goes on."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, PoolingParams, SamplingParams
from headrace.core.beam_search import BeamSearchParams
from headrace.core.errors import CapacityError, ConfigError, ModelError, RequestError
from tiny_server_model import tiny_server_model
from tiny_speech import tiny_whisper

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model(tmp_path_factory.mktemp("arguments") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", load_format="dummy", threads=1) as llm:
        yield llm


def ids(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": None}, "device must be text, got None"),
        ({"dtype": np.float32}, "dtype must be text, got <class 'numpy.float32'>"),
        ({"quantize": True}, "quantize must be text, got True"),
        ({"model": None}, "model must be text, got None"),
        ({"model": b"tiny"}, "model must be text, got b'tiny'"),
        ({"max_model_len": None}, "max_model_len must be a positive number or auto, got None"),
        ({"max_model_len": True}, "max_model_len must be a positive number or auto, got True"),
        ({"threads": 1.0}, "threads must be a positive number or auto, got 1.0"),
        ({"threads": 1025}, "threads must be at most 1024, got 1025"),
        ({"kv_memory": math.nan}, "kv_memory must be text, got nan"),
        ({"kv_memory": 1 << 20}, "kv_memory must be text, got 1048576"),
        ({"block_size": 16.0}, "block_size must be a whole number, got 16.0"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"seed": -1}, "seed must be 0 or more and fit in 64 bits, got -1"),
        ({"hash_seed": 2**64}, "hash_seed must be 0 or more and fit in 64 bits"),
        ({"prefix_caching": "maybe"}, "prefix_caching must be true or false, got 'maybe'"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init must be true or false, got 1"),
        ({"max_num_seqs": 65537}, "max_num_seqs must be at most 65536, got 65537"),
    ],
)
def test_options_of_a_wrong_type(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(**{"model": folder, "device": "cpu", "load_format": "dummy", **options})
    assert message in error.value.reason


def test_a_step_that_is_too_large_names_its_option(folder: Path) -> None:
    with pytest.raises(CapacityError, match="activations") as error:
        LLM(folder, device="cpu", load_format="dummy", max_num_batched_tokens=10**12)
    assert error.value.remedies == ("--max-num-batched-tokens 2048 (it is 1000000000000)",)


def test_more_threads_than_processors_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(folder, device="cpu", load_format="dummy", threads=300) as llm:
        assert len(ids(llm.generate("hi", GREEDY))[0]) == 3
    assert "more threads than processors, which take turns threads=300" in caplog.text


def test_a_chat_template_that_is_not_there_is_told_at_the_start(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"the chat template .*nothing.jinja cannot be read: .*No such file"):
        LLM(folder, device="cpu", load_format="dummy", chat_template=str(folder / "nothing.jinja"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"do_sample": true, "temperature": "hot"}', "could not convert string to float: 'hot'"),
        ('{"do_sample": true, "top_p": 0}', r"top_p must be in \(0, 1\], got 0.0"),
        ('{"do_sample": true, "top_k": Infinity}', "cannot convert float infinity to integer"),
    ],
)
def test_a_damaged_generation_config(tmp_path: Path, text: str, message: str) -> None:
    folder = tiny_server_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"generation_config.json .*{message}"):
        LLM(folder, device="null", load_format="dummy")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be one or a list of them, got None"),
        (5, "prompts must be one or a list of them, got 5"),
        (b"x", "prompts must be one or a list of them, got bytes b'x'"),
        ({"a", "b"}, "prompts must be one or a list of them, got set"),
        ([5], "a prompt is text or has prompt or prompt_token_ids, got int"),
        ({1: 2}, "a prompt is text or has prompt or prompt_token_ids, got the keys 1"),
        ({"prompt": "hi", "cache_slat": "x"}, "a prompt has prompt, prompt_token_ids, multi_modal_data, got str"),
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list of token ids, got 5"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of token ids, got str 'abc'"),
        ({"prompt_token_ids": {3, 4}}, "prompt_token_ids must be a list of token ids, got set {3, 4}"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids[0] must be a token id, got 1.5"),
        ({"prompt_token_ids": np.array([1.0])}, "prompt_token_ids[0] must be a token id, got"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1] must be a token id, got True"),
        ({"prompt_token_ids": ["1"]}, "prompt_token_ids[0] must be a token id, got str '1'"),
        ({"prompt_token_ids": [None]}, "prompt_token_ids[0] must be a token id, got None"),
        ({"prompt_token_ids": [[1]]}, "prompt_token_ids[0] must be a token id, got list [1]"),
        ({"prompt_token_ids": [2**70]}, "is outside the vocabulary"),
    ],
)
def test_prompts_that_are_none(llm: LLM, prompts: Any, message: str) -> None:
    for call in (llm.generate, llm.beam_search):
        with pytest.raises(RequestError) as error:
            call(prompts)
        assert message in error.value.reason


def test_prompts_in_other_containers(llm: LLM) -> None:
    wanted = ids(llm.generate([{"prompt_token_ids": [5, 6]}, "hello"], GREEDY))
    for given in ((5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), range(5, 7), iter([5, 6])):
        many: Any = (prompt for prompt in ({"prompt_token_ids": given}, "hello"))
        assert ids(llm.generate(many, GREEDY)) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": 5}, "sampling_params must be SamplingParams, got 5"),
        ({"sampling_params": {"max_tokens": 2}}, "sampling_params must be SamplingParams, got dict"),
        ({"sampling_params": {}}, "sampling_params must be SamplingParams, got dict {}"),
        ({"sampling_params": []}, "1 prompts need 1 sampling_params, got 0"),
        ({"sampling_params": [None]}, "sampling_params must be SamplingParams, got None"),
        ({"sampling_params": SamplingParams}, "sampling_params must be SamplingParams, got type"),
        ({"sampling_params": SamplingParams(n=10**9)}, "n must be at most 4096, got 1000000000"),
        ({"priority": "x"}, "priority must be a whole number of 64 bits, got str 'x'"),
        ({"priority": None}, "priority must be a whole number of 64 bits, got None"),
        ({"priority": 2**63}, "priority must be a whole number of 64 bits"),
        ({"priority": [1, 2]}, "1 prompts need 1 priority, got 2"),
        ({"cache_salt": None}, "cache_salt must be text, got None"),
        ({"cache_salt": b"x"}, "cache_salt must be text, got bytes b'x'"),
    ],
)
def test_other_arguments_of_generate(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate("hi", **options)
    assert message in error.value.reason


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages must be one or a list of them, got None"),
        (5, "messages must be one or a list of them, got 5"),
        ("hi", "messages must be a list such as [{'role': 'user', 'content': ...}], got str 'hi'"),
        ({"role": "user", "content": "x"}, "messages must be a list such as"),
        ([], "there is no message to answer"),
        (["hi"], "messages[0] must be an object with role and content, got str 'hi'"),
        ([{"role": "user", "content": "x"}, 5], "messages[1] must be an object with role and content, got 5"),
        ([[{"role": "user", "content": "x"}], 5], "prompt 1 of 2: messages must be one or a list of them, got 5"),
    ],
)
def test_messages_that_are_none(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.chat(messages)
    assert message in error.value.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": 5}, "tools must be a list of objects, got 5"),
        ({"tools": [{}, "x"]}, "tools must be a list of objects, got str 'x'"),
        ({"documents": {"a": 1}}, "documents must be a list of objects, got dict"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be true or false, got str 'no'"),
        ({"continue_final_message": 1}, "continue_final_message must be true or false, got 1"),
        ({"chat_template": 5}, "chat_template must be the text of a template, got 5"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a mapping, got 5"),
    ],
)
def test_template_options_of_a_wrong_type(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.chat([{"role": "user", "content": "x"}], GREEDY, **options)
    assert message in error.value.reason


def test_a_template_and_its_variables_in_the_call(llm: LLM) -> None:
    messages = [{"role": "user", "content": "x"}]
    template = "{{ messages[0].content }}{{ mood }}"
    text = llm.render_chat(messages, chat_template=template, chat_template_kwargs={"mood": "!"})
    assert text == "x!"
    [output] = llm.chat(messages, GREEDY, chat_template=template, mood="?")
    assert output.prompt == "x?"
    assert llm.render_chat(messages).startswith("<|im_start|>user\nx")  # the model's own is as it was


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(folder, device="null", load_format="dummy")
    open_stream = llm.stream("hi", GREEDY)
    next(open_stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("hi"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream("hi"),
        lambda: next(open_stream),
        lambda: llm.__enter__(),
    ):
        with pytest.raises(RequestError, match="this LLM is closed"):
            call()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": "x"}, "beam_width must be a whole number, got 'x'"),
        ({"beam_width": 2.0}, "beam_width must be a whole number, got 2.0"),
        ({"max_tokens": None}, "max_tokens must be a whole number, got None"),
        ({"length_penalty": "x"}, "length_penalty must be a number, got 'x'"),
        ({"length_penalty": math.nan}, "length_penalty must be finite, got nan"),
        ({"early_stopping": "ever"}, "early_stopping must be True, False or 'never', got 'ever'"),
    ],
)
def test_beam_search_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BeamSearchParams(**params)
    assert message in error.value.reason


@pytest.mark.parametrize("params", [5, 0, {"beam_width": 2}, SamplingParams(), BeamSearchParams])
def test_what_are_no_beam_search_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params must be BeamSearchParams, got"):
        llm.beam_search("x", params)


def test_embeddings_of_what_is_no_text(folder: Path) -> None:
    with LLM(folder, device="cpu", load_format="dummy", pooling="last", threads=1) as llm:
        for texts in (None, 5, [5], [None], {"a": 1}, {1: 2}, {"prompt_token_ids": 5}, {"prompt_token_ids": [1.5]}):
            with pytest.raises(RequestError):
                llm.embed(texts)  # type: ignore[arg-type]
        for query in (None, 5, [5], {"a": 1}):
            with pytest.raises(RequestError):
                llm.score(query, "x")  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                llm.score("x", query)  # type: ignore[arg-type]
        for params in (5, {"dimensions": 8}, SamplingParams(), PoolingParams):
            with pytest.raises(RequestError, match="pooling_params must be PoolingParams, got"):
                llm.embed("x", params)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="pooling_params must be PoolingParams, got"):
                llm.score("x", "y", params)  # type: ignore[arg-type]
        assert llm.embed([]) == []
        assert len(llm.embed({"prompt_token_ids": np.array([1, 2])})) == 1


def test_recordings_that_are_none(tmp_path: Path) -> None:
    with LLM(tiny_whisper(tmp_path / "whisper"), device="cpu", load_format="dummy", threads=1) as llm:
        wrong: list[Any] = [5, None, {}, {"a"}, [5], [None]]
        for given in wrong:
            with pytest.raises(RequestError, match="recording"):
                llm.transcribe(given)
        others: list[Any] = [5, {}, SamplingParams()]
        for params in others:
            with pytest.raises(RequestError, match="params must be TranscriptionParams, got"):
                llm.transcribe([], params)
        assert llm.transcribe([]) == []


def test_threads_share_the_steps(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompts = [f"hello {i}" for i in range(4)]
    alone = [ids(llm.generate(prompt, params)) for prompt in prompts]
    found: dict[int, list[list[list[int]]]] = {}

    def ask(i: int) -> None:
        found[i] = []
        for n in range(6):
            if n % 2:
                *_, last = llm.stream(prompts[i], params)
                found[i].append(ids([last]))
            else:
                found[i].append(ids(llm.generate(prompts[i], params)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert found == {i: [alone[i]] * 6 for i in range(4)}
    assert not llm.built.engine.has_unfinished()


def test_closing_ends_what_other_threads_wait_for(folder: Path) -> None:
    llm = LLM(folder, device="null", load_format="dummy")
    begun, errors = threading.Event(), list[RequestError]()

    def ask() -> None:
        try:
            for _ in llm.stream("hello", SamplingParams(max_tokens=4000, ignore_eos=True)):
                begun.set()
        except RequestError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(30)
    llm.close()
    thread.join(30)
    assert [error.reason for error in errors] == ["this LLM is closed"]


def test_forks(folder: Path) -> None:
    """The child of an idle LLM goes on with it, threads included; one of a busy LLM is told."""
    code = f"""
import os, threading, warnings
from headrace import LLM, SamplingParams, StructuredOutputParams
warnings.simplefilter("ignore")
form = StructuredOutputParams(kind="regex", value="a*")
params = SamplingParams(max_tokens=8, structured_output=form, temperature=0, ignore_eos=True)
llm = LLM({str(folder)!r}, device="cpu", load_format="dummy", kv_memory="8MiB", threads=1)
want = llm.generate("hello", params)[0].outputs[0].text

def forked(run):
    if os.fork() == 0:
        try:
            run()
        except BaseException as error:
            print(error.reason, flush=True)
        os._exit(0)
    os.wait()

forked(lambda: print(llm.generate("hello", params)[0].outputs[0].text == want, flush=True))
step, begun, done = llm.built.engine.step, threading.Event(), threading.Event()

def long_step():
    begun.set()
    done.wait()
    return step()

llm.built.engine.step = long_step
thread = threading.Thread(target=lambda: llm.generate("hello", params))
thread.start()
begun.wait()
forked(lambda: llm.generate("hello", params))
forked(lambda: print(llm.close(), flush=True))
done.set()
thread.join()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    first, second, third = found.stdout.splitlines()
    assert (first, third) == ("True", "None")
    assert second == "this process was forked while another thread was in the midst of a step of this LLM"
