"""`headrace complete`: one prompt, one text, streamed."""

import collections
import dataclasses
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from .options import engine_config, engine_options, json_option, sampling_options
from .output import print_json, write_text
from .start import only_lora, start_llm

if TYPE_CHECKING:
    from ..stages import RequestOutput

_logger = logging.getLogger(__name__)


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="An image before the prompt; may be repeated.")
@sampling_options
@engine_options
@json_option
def command(
    arguments: tuple[str, ...],
    raw: bool,
    images: tuple[str, ...],
    sampling: dict[str, Any],
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """Complete a prompt, or answer it if the model is an instruct model.

    With one argument the default model is used. A PROMPT of - is read from stdin (UTF-8; one newline at its end
    is dropped). Temperature, top-p and top-k default to what the model's generation config says.
    """
    if not 1 <= len(arguments) <= 2:
        hint = (
            "no prompt was given" if not arguments else "more than a model and a prompt were given; quote the prompt"
        )
        raise click.UsageError(hint, click.get_current_context())
    config = engine_config(flags, model=arguments[0] if len(arguments) == 2 else None)
    prompt = read_prompt(arguments[-1])
    check_sampling(sampling)
    lora = only_lora(config)

    with start_llm(config) as llm:
        params = dataclasses.replace(llm.default_sampling_params, **sampling)
        use_template = llm.has_chat_template and not raw
        request: Any = [{"role": "user", "content": with_images(prompt, images)}] if use_template else prompt
        if images and not use_template:
            request = {"prompt": prompt, "multi_modal_data": {"image": list(images)}}
        outputs = llm.stream(request, params, lora=lora)
        last = drain(outputs) if as_json else write_stream(outputs)
        if as_json:
            print_json(_as_json(llm.built.model.name, prompt, last))
    log_speed(last)


def read_prompt(argument: str) -> str:
    """The prompt that an argument stands for. Raises RequestError for text that is not UTF-8, or empty."""
    if argument == "-":
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"stdin is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
                code="invalid_utf8",
                remedies=["iconv -f latin1 -t utf-8 | headrace complete -"],
            ) from None
        prompt = prompt.removesuffix("\n")
    else:
        prompt = argument
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not UTF-8 at character {error.start}",
                code="invalid_utf8",
                remedies=["LC_ALL=C.UTF-8", "the prompt on stdin, with - as PROMPT"],
            ) from None
    if not prompt:
        raise RequestError(
            "the prompt is empty", code="empty_prompt", remedies=["headrace complete 'Once upon a time'"]
        )
    return prompt


def with_images(text: str, images: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message with images of these files."""
    if not images:
        return text
    return [*({"type": "image", "path": image} for image in images), {"type": "text", "text": text}]


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise RequestError for bad sampling options before a model is loaded for them."""
    from ..sampling.params import SamplingParams

    SamplingParams(**sampling)


def write_stream(outputs: Iterable["RequestOutput"]) -> "RequestOutput":
    """Write the text to stdout as it grows, and a newline at its end, also of a broken-off one.

    Returns the last output.
    """
    text, last = "", None
    try:
        for last in outputs:
            written, text = len(text), last.outputs[0].text
            write_text(text[written:])
    finally:
        if text and not text.endswith("\n"):
            write_text("\n")
    assert last is not None, "a request ends with at least one output"
    return last


def drain(outputs: Iterable["RequestOutput"]) -> "RequestOutput":
    """The finished output."""
    return collections.deque(outputs, maxlen=1)[0]


def log_speed(output: "RequestOutput") -> None:
    """Tokens and speed of a finished request, to the log."""
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    fields.update(_speed(output))
    _logger.info("finished", extra={"fields": fields})


def _speed(output: "RequestOutput") -> dict[str, float]:
    timings, count = output.timings, len(output.outputs[0].token_ids)
    if timings is None or timings.first_token_s is None or timings.finished_s is None:
        return {}
    speed = {"ttft_s": timings.first_token_s - timings.arrival_s}
    decode_s = timings.finished_s - timings.first_token_s
    if count > 1 and decode_s > 0:
        speed["decode_tokens_per_s"] = (count - 1) / decode_s
    return speed


def _as_json(model: str, prompt: str, output: "RequestOutput") -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "model": model,
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(completion.token_ids),
        **_speed(output),
    }
