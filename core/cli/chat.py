"""`headrace chat`: a conversation in the terminal, with a model in this process or behind a URL."""

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from .complete import check_sampling, with_images, write_stream
from .exits import noted_interrupt
from .options import engine_config, engine_options, refuse_with_url, sampling_options
from .output import visible, write_text
from .start import only_lora, start_llm

if TYPE_CHECKING:
    from ..llm import LLM
    from ..sampling.params import SamplingParams
    from ..stages import RequestOutput
    from .remote import RemoteChat

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command()
@click.argument("model", default=None, required=False)
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="An image before the first line.")
@click.option("--url", metavar="URL", help="Chat with a server of OpenAI's API instead of loading a model.")
@click.option("--api-key", metavar="KEY", help="Key for --url; default: HEADRACE_API_KEY or OPENAI_API_KEY.")
@sampling_options
@engine_options
def command(
    model: str | None,
    system: str | None,
    images: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    sampling: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """Chat with a model in the terminal.

    With --url, MODEL is a name that the server has for it, by default the first that it lists. /reset forgets the
    conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer. Lines can also be piped in.
    """
    config = engine_config(flags, model=model)
    check_sampling(sampling)
    if url is not None:
        refuse_with_url(flags)
        if images:
            raise click.UsageError("--image is for a model that is loaded here, not for --url")
        from .remote import RemoteChat

        remote = RemoteChat(url, model=model or "", api_key=api_key or "")
        click.echo(f"chatting with {visible(remote.model)}", err=True)
        _converse(lambda messages: _answer_remote(remote, messages, sampling), system)
        return

    lora = only_lora(config)
    with start_llm(config) as llm:
        if not llm.has_chat_template:
            raise RequestError(
                f"{llm.built.model.name} has no chat template, so it cannot chat",
                code="no_chat_template",
                remedies=["--chat-template FILE", "headrace complete MODEL PROMPT"],
            )
        params = dataclasses.replace(llm.default_sampling_params, **sampling)
        _converse(lambda messages: _answer(llm, messages, params, lora), system, images)


def _converse(
    answer_to: Callable[[list[dict[str, Any]]], str], system: str | None, images: Sequence[str] = ()
) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(start)
    if isinstance(sys.stdin, io.TextIOWrapper):  # one wrong byte is no reason to end a conversation
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="replace")
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
            is_first = len(messages) == len(start)
            messages.append({"role": "user", "content": with_images(line, images if is_first else ())})
            answer = answer_to(messages)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # templates refuse two turns of the user in a row


def _answer(llm: "LLM", messages: list[dict[str, Any]], params: "SamplingParams", lora: str) -> str:
    """Stream the answer; what there is of it if it was stopped, "" if it was refused."""
    with noted_interrupt() as pressed:
        try:
            outputs = llm.stream(messages, params, lora=lora)
            text = write_stream(_until(outputs, pressed)).outputs[0].text
        except RequestError as error:
            _tell(error)
            return ""
        if pressed():
            click.echo("(stopped)", err=True)
        return text


def _answer_remote(remote: "RemoteChat", messages: list[dict[str, Any]], sampling: dict[str, Any]) -> str:
    """The same with a server."""
    from .remote import Stopped, stopped_by_interrupt

    text = ""
    try:
        with stopped_by_interrupt():
            for piece in remote.stream(messages, sampling):
                text += piece
                write_text(piece)
    except Stopped:
        click.echo("\n(stopped)", err=True)
    except RequestError as error:
        _tell(error)
    if text and not text.endswith("\n"):
        click.echo()
    return text


def _tell(error: RequestError) -> None:
    """What went wrong with one answer; the conversation goes on."""
    click.echo(f"error: {error}", err=True)
    if "max_model_len" in error.reason:
        click.echo(f"the conversation is too long to go on: {_HELP}", err=True)


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
