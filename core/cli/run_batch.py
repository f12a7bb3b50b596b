"""`headrace run-batch`: a file of requests in, a file of answers out."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import click

from .exits import SIGNALLED, print_error
from .options import engine_config, engine_options, json_option
from .output import print_json

logger = logging.getLogger(__name__)


@click.command()
@click.argument("source", metavar="INPUT.jsonl", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUTPUT.jsonl", type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="The model; the requests' `model` must be its name.")
@engine_options
@json_option
@click.pass_context
def command(
    context: click.Context, source: Path, target: Path, model: str | None, flags: dict[str, Any], as_json: bool
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Answers are appended to OUTPUT.jsonl as they come. Requests that it has an answer to are left out, so the same
    command goes on with a batch that was broken off.
    """
    config = engine_config(flags, model=model)

    from ..server.batch import run_batch

    summary = run_batch(config, source, target)
    if as_json:
        print_json(dataclasses.asdict(summary))
    logger.info("batch", extra={"fields": dataclasses.asdict(summary)})
    if not summary.is_complete:
        print_error(f"interrupted; the answers so far are in {target}", ["the same command goes on from there"])
        context.exit(SIGNALLED + summary.signal)
