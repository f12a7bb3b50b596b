"""Command-line options: the engine's, made from the config fields, and the few that commands share."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from ..config import EngineConfig, all_options, is_list
from ..settings import flag_of, option_type, resolve_options
from .logs import configure_logging

Function = Callable[..., Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def engine_options(function: Function) -> Function:
    """Add the options of the engine with `cli=True`, and --config; the function gets what was typed as `flags`.

    `engine_config(flags, model=...)` makes the configuration of it.
    """
    return engine_options_without()(function)


def engine_options_without(*unused: str) -> Callable[[Function], Function]:
    """The same for a command to which some of them mean nothing: their names, or groups of `EngineConfig`."""
    return lambda function: _config_options(function, ("server", *unused))


def server_options(function: Function) -> Function:
    """Add the options of engine and server, as `engine_options` does."""
    return _config_options(function, ())


def _config_options(function: Function, unused: Sequence[str]) -> Function:
    names = [
        name
        for name, (group, field) in all_options().items()
        if field.metadata["cli"] and not {name, group} & {*unused}
    ]

    @wraps(function)
    def wrapper(**arguments: Any) -> Any:
        flags = {name: arguments.pop(name) for name in names}
        flags["config"] = arguments.pop("config")
        return function(flags=flags, **arguments)

    decorated: Function = click.option(
        "--config", metavar="FILE", help="TOML file with options as flat keys, such as max-model-len = 4096."
    )(wrapper)
    for name in reversed(names):
        _, field = all_options()[name]
        is_bool, is_many = field.type is bool, is_list(name)
        default = ("yes" if field.default else "no") if is_bool else field.default
        shown = "; may be repeated." if is_many else f".  [default: {default}]" if default != "" else "."
        decorated = click.option(
            f"{flag_of(name)}/--no-{flag_of(name)[2:]}" if is_bool else flag_of(name),
            name,
            default=None,
            multiple=is_many,
            metavar=None if is_bool else "NAME=FOLDER" if is_many else _metavar(field),
            help=_sentence(field.metadata["help"]) + shown,
        )(decorated)
    return decorated


def engine_config(flags: dict[str, Any], *, model: str | None = None) -> EngineConfig:
    """The configuration from what `engine_options` collected; logging is set up as it says.

    model: the MODEL argument; None leaves it to HEADRACE_MODEL, the file or the default.
    """
    options = {name: value for name, value in flags.items() if name != "config"}
    config = resolve_options({**options, "model": model}, config_file=flags["config"])
    configure_logging(config.log)
    return config


def refuse_with_url(flags: dict[str, Any], *used: str) -> None:
    """Raise UsageError for an option of the engine that was typed beside --url, where no engine is ours. used: names,
    or groups of `EngineConfig`, that have a meaning all the same."""
    for name, value in flags.items():
        if name != "config" and value not in (None, ()) and not {name, all_options()[name][0]} & {"log", *used}:
            raise click.UsageError(f"{flag_of(name)} is for a model that is loaded here, not for --url")


def sampling_options(function: Function) -> Function:
    """Add the sampling options; the function gets those that were given as `sampling`, by SamplingParams' names."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop")

    @wraps(function)
    def wrapper(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in names}
        sampling = {name: value for name, value in given.items() if value is not None and value != ()}
        return function(sampling=sampling, **arguments)

    decorated: Function = wrapper
    for option in (
        click.option("--stop", multiple=True, metavar="TEXT", help="End when this text appears; may be repeated."),
        click.option("--top-k", type=int, metavar="N", help="Sample from the N most likely tokens."),
        click.option("--top-p", type=float, metavar="P", help="Sample from the tokens that make up probability P."),
        click.option("--temperature", type=float, metavar="T", help="0 is greedy; default: the model's own."),
        click.option("--max-tokens", type=int, metavar="N", help="Tokens of output at most."),
    ):
        decorated = option(decorated)
    return decorated


def _sentence(text: str) -> str:
    """A field's help as the commands' own options have it; `auto` is a value and stays as it is typed."""
    return text if text.startswith("auto") else text[0].upper() + text[1:]


def _metavar(field: Any) -> str:
    kind = option_type(field)
    return {"text": "TEXT", "number": "N", "number or auto": "N|auto"}.get(kind, kind.replace(" ", ""))
