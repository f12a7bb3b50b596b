"""`headrace embed`: texts in, one vector a line out."""

import json
import sys
from typing import Any

import click

from ..errors import RequestError
from .options import engine_config, engine_options_without, json_option
from .output import print_json
from .start import start_llm


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--dimensions", type=int, help="Numbers to keep of each embedding (Matryoshka models).")
@click.option("--prompt-name", help="Which of the checkpoint's prompts stands before each text.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long, instead of refusing them.")
@engine_options_without("chat_template", "lora", "speculative", "seed")
@json_option
def command(
    model: str,
    texts: tuple[str, ...],
    dimensions: int | None,
    prompt_name: str | None,
    truncate: bool,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """Print the embedding of each TEXT, as one JSON array a line.

    A single TEXT of - takes each line of stdin (UTF-8) as a text.
    """
    from ..pooling.params import PoolingParams

    config = engine_config(flags, model=model)
    params = PoolingParams(
        dimensions=dimensions, prompt_name=prompt_name, truncate_prompt_tokens=-1 if truncate else None
    )
    many = _read_lines() if texts == ("-",) else list(texts)
    with start_llm(config) as llm:
        outputs = llm.embed(many, params)
        if as_json:
            entries = [
                {"text": text, "num_tokens": len(output.prompt_token_ids), "embedding": output.embedding.tolist()}
                for text, output in zip(many, outputs, strict=True)
            ]
            print_json({"model": llm.built.model.name, "embeddings": entries})
            return
        for output in outputs:
            click.echo(json.dumps(output.embedding.tolist()))


def _read_lines() -> list[str]:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            code="invalid_utf8",
            remedies=["iconv -f latin1 -t utf-8 | headrace embed MODEL -"],
        ) from None
