"""`headrace bench`: measure speed."""

import json
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from .options import engine_config, engine_options, json_option
from .output import print_json, print_table


@click.group()
def command() -> None:
    """Measure speed."""


@command.command()
@click.argument("model", default=None, required=False)
@click.option("--workload", metavar="FILE", help="Requests as token ids (JSON); instead of random ones.")
@click.option("--select", default="W1,W2,W3,W4", show_default=True, help="Which workloads of the file to run.")
@click.option("--num-prompts", default=64, show_default=True, type=click.IntRange(1), help="Random requests.")
@click.option("--input-len", default=128, show_default=True, type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", default=128, show_default=True, type=click.IntRange(2), help="Tokens of each output.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Runs; medians are reported.")
@engine_options
@json_option
def offline(
    model: str | None,
    workload: str | None,
    select: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    repeat: int,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """Throughput and latency without a server; with `--device null`, what headrace itself costs per step.

    Output lengths are exact (the end of sequence is ignored) and sampling is greedy. Repeated runs share no
    prefix cache.
    """
    config = engine_config({**flags, "max_num_seqs": flags["max_num_seqs"] or str(max(64, num_prompts))}, model=model)
    workloads = None if workload is None else _read(Path(workload), select)

    from .bench_offline import measure_random, measure_workloads, open_llm

    with open_llm(config) as llm:
        if workloads is None:
            result = measure_random(llm, num_prompts, input_len, output_len, repeat, seed=config.scheduler.seed)
        else:
            result = measure_workloads(llm, workloads, repeat)
    if as_json:
        print_json(result)
        return
    click.echo(f"{result['model']} on {result['device']}, {result['dtype']}\n")
    rows = [
        (name, figure, f"{value:.1f}" if isinstance(value, float) else str(value))
        for name, figures in result["workloads"].items()
        for figure, value in figures.items()
    ]
    print_table(("workload", "figure", "value"), rows, numbers=("value",))


def _read(path: Path, select: str) -> dict[str, Any]:
    """The selected workloads of a file, and its warm-up if it has one. Raises ConfigError."""
    from .bench_offline import SHAPES, check_requests

    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the workload {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    names = [name.strip() for name in select.split(",")]
    for name in names:
        if not isinstance(data, dict) or name not in data or name not in SHAPES:
            known = ", ".join(key for key in SHAPES if isinstance(data, dict) and key in data)
            raise ConfigError(f"{path} has no workload {name!r} that can be run; it has {known or 'none'}")
    return {
        name: check_requests(data[name], f"{path}: {name}", nested=SHAPES.get(name) == "sets")
        for name in (*(["warm"] if "warm" in data else []), *names)
    }
