"""`LLM` and the command line with images: every way to give one is the same, and a model without them reads text."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.core.cli.complete import command
from headrace.core.errors import RequestError
from vision_cases import data_url, make_chat_model, picture

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "reference", "dtype": "float32", "kv_memory": "16MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    make_chat_model(path)
    picture(1).save(path / "one.png")
    return path


def test_every_way_to_give_an_image_is_the_same(folder: Path) -> None:
    file = folder / "one.png"
    question = {"type": "text", "text": "What is it?"}
    with LLM(str(folder), **OPTIONS) as llm:
        chats: list[Any] = [
            [{"role": "user", "content": [part, question]}]
            for part in (
                {"type": "image", "image": picture(1)},
                {"type": "image", "path": str(file)},
                {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
            )
        ]
        answers = [output.outputs[0].token_ids for output in llm.chat(chats, GREEDY)]
        text = llm.render_chat([{"role": "user", "content": [{"type": "image"}, question]}])
        assert text.count("<image>") == 1
        for image in (picture(1), file, file.read_bytes(), [str(file)]):
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == answers[0]
        assert answers == [answers[0]] * 3
        streamed = [*llm.stream(chats[0], GREEDY)][-1]
        assert streamed.outputs[0].token_ids == answers[0]
        first: Any = {"prompt": "What?", "multi_modal_data": {"image": file}}  # without a place: in front
        named: Any = {"prompt": "<image>What?", "multi_modal_data": {"image": file}}
        one, other = llm.generate([first, named], GREEDY)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        want = [*llm.stream(chats[0], SamplingParams(temperature=0.0, max_tokens=6))][-1].outputs[0].text
    arguments = [str(folder), "What is it?", "--image", str(file), "--max-tokens", "6", "--temperature", "0"]
    arguments += ["--device", "reference", "--dtype", "float32", "--kv-memory", "16MiB"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == want.rstrip("\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [({"video": 1}, "one image or a list"), ({"image": "no-such-file.png"}, "cannot be read"), ([1], "one image")],
)
def test_wrong_data_is_named(folder: Path, data: Any, message: str) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate({"prompt": "<image>", "multi_modal_data": data}, GREEDY)


def test_on_the_cpu_the_language_model_behind_images_is_a_native_program(folder: Path) -> None:
    prompts: Any = [
        {"prompt": f"<image>{text}", "multi_modal_data": {"image": picture(1)}} for text in ("Yes", "No?")
    ]
    found = []
    for device in ("reference", "cpu"):
        with LLM(str(folder), **{**OPTIONS, "device": device}) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate([*prompts, "Well"], GREEDY)])
            runner = llm.built.engine.executor._runner.runner  # type: ignore[attr-defined]
    assert type(runner).__name__ == "NativeRunner" and found[0] == found[1]


def test_without_images_the_language_model_is_loaded_alone(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        want = llm.generate("The quick brown fox", GREEDY)[0].outputs[0].token_ids
    with LLM(str(folder), **{**OPTIONS, "device": "cpu"}, images=False) as llm:
        assert type(llm.built.engine.executor._runner.runner).__name__ == "NativeRunner"  # type: ignore[attr-defined]
        assert llm.generate("The quick brown fox", GREEDY)[0].outputs[0].token_ids == want
        with pytest.raises(RequestError, match="reads no images"):
            llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(1)}}, GREEDY)
