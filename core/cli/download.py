"""`headrace download`: fetch a model into the cache; an interrupted download goes on where it stopped."""

from typing import Any

import click

from .options import engine_config, engine_options_without, json_option
from .output import print_json


@click.command()
@click.argument("model", default=None, required=False)
@engine_options_without("dtype", "quantize", "max_model_len", "chat_template", "lora", "device", "kv", "scheduler")
@json_option
def command(model: str | None, flags: dict[str, Any], as_json: bool) -> None:
    """Fetch a model into the cache, and print where it is.

    MODEL is a hub id (org/name); without it, the embedded default model is fetched.
    """
    config = engine_config(flags, model=model)

    from ..hub import resolve_model

    found = resolve_model(config.model, lambda line: click.echo(line, err=True))
    if as_json:
        print_json({"name": found.name, "kind": found.kind, "path": str(found.path)})
    else:
        click.echo(str(found.path))
