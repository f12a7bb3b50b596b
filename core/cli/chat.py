"""`headrace chat`: a conversation in the terminal, with a model in this process."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from .complete import check_sampling, write_stream
from .exits import noted_interrupt
from .options import engine_config, engine_options, sampling_options
from .start import start_llm

if TYPE_CHECKING:
    from ..llm import LLM
    from ..sampling.params import SamplingParams
    from ..stages import RequestOutput

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command()
@click.argument("model", default=None, required=False)
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@sampling_options
@engine_options
def command(model: str | None, system: str | None, sampling: dict[str, Any], flags: dict[str, Any]) -> None:
    """Chat with a model in the terminal.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer. Lines can also be piped in.
    """
    config = engine_config(flags, model=model)
    check_sampling(sampling)

    with start_llm(config) as llm:
        if not llm.has_chat_template:
            raise RequestError(
                f"{llm.built.model.name} has no chat template, so it cannot chat",
                code="no_chat_template",
                remedies=["--chat-template FILE", "headrace complete MODEL PROMPT"],
            )
        _converse(llm, dataclasses.replace(llm.default_sampling_params, **sampling), system)


def _converse(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    click.echo(_HELP, err=True)
    while True:
        line = _read_line()
        if line is None or line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages = list(start)
            click.echo("the conversation is forgotten", err=True)
        elif line.strip().startswith("/"):
            click.echo(f"no such command; {_HELP}", err=True)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, params)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # templates refuse two turns of the user in a row


def _answer(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Stream the answer; what there is of it if it was stopped, "" if it was refused."""
    with noted_interrupt() as pressed:
        try:
            outputs = llm.stream(messages, params)
            text = write_stream(_until(outputs, pressed)).outputs[0].text
        except RequestError as error:
            click.echo(f"error: {error}", err=True)
            return ""
        if pressed():
            click.echo("(stopped)", err=True)
        return text


def _until(outputs: "Iterator[RequestOutput]", pressed: Callable[[], bool]) -> "Iterator[RequestOutput]":
    """The outputs up to Ctrl-C; leaving early aborts the request between two steps."""
    for output in outputs:
        yield output
        if pressed():
            return


def _read_line() -> str | None:
    """The next line of the user, None at the end of input. Ctrl-C at the prompt ends the chat."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() history and editing

        try:
            return input("> ")
        except EOFError:
            click.echo()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
