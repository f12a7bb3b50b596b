"""`headrace serve`: a model behind the APIs of OpenAI and Anthropic."""

from typing import Any

import click

from .options import engine_config, server_options


@click.command()
@click.argument("model", default=None, required=False)
@server_options
@click.pass_context
def command(context: click.Context, model: str | None, flags: dict[str, Any]) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic.

    Listens on 127.0.0.1:8000 unless told otherwise. SIGTERM or Ctrl-C lets running requests finish first.
    """
    config = engine_config(flags, model=model)

    from ..server.run import serve

    context.exit(serve(config))
