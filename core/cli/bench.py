"""`headrace bench`: measure speed."""

from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..json_text import parse_json
from .options import engine_config, engine_options, engine_options_without, json_option, refuse_with_url
from .output import check_writable, print_json, print_table, saved


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
@click.option(
    "--rest",
    "rest_s",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds before each run, in which the device gets memory ready as between a server's requests.",
)
@engine_options_without("chat_template", "lora")
@json_option
def offline(
    model: str | None,
    workload: str | None,
    select: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    repeat: int,
    rest_s: float,
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
            seed = config.scheduler.seed
            result = measure_random(llm, num_prompts, input_len, output_len, repeat, seed=seed, rest_s=rest_s)
        else:
            result = measure_workloads(llm, workloads, repeat, rest_s=rest_s)
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


@command.command()
@click.argument("model", default=None, required=False)
@click.option("--url", help="A server that runs, such as http://127.0.0.1:8000; instead of starting one for MODEL.")
@click.option("--versus", metavar="URL", help="Another server: measured by turns, and compared.")
@click.option("--served-model", metavar="NAME", help="The `model` of requests; default: the first that each lists.")
@click.option("--concurrency", metavar="N,N", help="Requests at a time, each level by itself.  [default: 1,8,32]")
@click.option("--rate", metavar="R,R", help="Requests a second, arriving at random (Poisson), instead.")
@click.option(
    "--workload",
    default="synthetic",
    show_default=True,
    metavar="synthetic|w5|FILE",
    help="Random prompts of --input-len; of lengths as people write; JSON lines with bodies of requests.",
)
@click.option("--select", default="W5", show_default=True, help="Which list of a FILE that is one JSON object.")
@click.option("--num-requests", type=click.IntRange(1), help="Per level.  [default: 2 per place, 30 s of a rate]")
@click.option("--input-len", default=128, show_default=True, type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each output.")
@click.option("--spread", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="Of the lengths, +-.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Rounds; medians are reported.")
@click.option("--goodput", "goodput", metavar="LIMITS", help="What a good request keeps to, in ms: ttft:300,tpot:50.")
@click.option("--body", default="{}", metavar="JSON", help="Further fields of every request.")
@click.option(
    "--vocab-size", type=click.IntRange(2), help="Random ids are below it.  [default: the model's, or 8000]"
)
@click.option("--timeout-s", default=600.0, show_default=True, help="That a request may take.")
@click.option("--output", metavar="FILE", help="Write the JSON object here as well.")
@click.option("--png", metavar="FILE", help="Draw the result (needs the extra `bench`).")
@engine_options
@json_option
def serve(model: str | None, flags: dict[str, Any], as_json: bool, **arguments: Any) -> None:
    """Latency and throughput of a server under load: time to the first token, between tokens, per request.

    Starts `headrace serve MODEL` with the given options, or measures the server at --url. No prompt of a round hits
    another round's prefixes.
    """
    config = engine_config(flags, model=model)
    if arguments["url"]:
        refuse_with_url(flags, "model", "seed")

    from .bench_plot import draw_serve
    from .bench_serve_run import Options, run

    options = Options(**arguments)
    result = run(config, options)
    with saved(result, options.output, options.png, draw_serve):
        print_json(result) if as_json else _show_serve(result)


def _show_serve(result: dict[str, Any]) -> None:
    for name, levels in result["servers"].items():
        click.echo(f"{name}: {result['models'][name]}\n")
        print_table(("load", *_FIGURES), [(_load(level), *_row(level)) for level in levels], numbers=tuple(_FIGURES))
        errors = [f"{count} x {error}" for level in levels for error, count in level["errors"].items()]
        click.echo("\n" + "\n".join(errors or ["no errors"]) + "\n")
    if result["ratios"]:
        click.echo("times better than versus\n")
        names = ("output_tokens_per_s", "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
        rows = [
            (
                _load(row),
                *(_number(row[n]["p50"] if isinstance(row[n], dict) else row[n]) if n in row else "-" for n in names),
            )
            for row in result["ratios"]
        ]
        print_table(("load", *names), rows, numbers=names)


@command.command()
@click.argument("model", default=None, required=False)
@click.option(
    "--runs", default=5, show_default=True, type=click.IntRange(1), help="Starts after the first, cold one."
)
@click.option("--prompt", default="Why is the sky blue?", show_default=True, help="Of which one token is generated.")
@click.option("--versus", metavar="COMMAND", help="Another engine's command line: run by turns, and compared.")
@click.option("--output", metavar="FILE", help="Write the JSON object here as well.")
@engine_options
@json_option
def startup(
    model: str | None,
    runs: int,
    prompt: str,
    versus: str | None,
    output: str | None,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """From the start of a process to its first token, with its peak memory; medians over child processes.

    Times end at the first byte on stdout and at the end of the process. The command of --versus should generate one
    token too, and write nothing before it.
    """
    config = engine_config(flags, model=model)
    if output:
        check_writable(Path(output))

    from .bench_startup import measure_startup

    result = measure_startup(config, prompt=prompt, runs=runs, versus=versus)
    with saved(result, output):
        print_json(result) if as_json else _show_startup(result, runs)


def _show_startup(result: dict[str, Any], runs: int) -> None:
    from ..units import format_bytes

    rows = [
        (
            name,
            kind,
            f"{start['first_output_s']:.2f}",
            f"{start['end_s']:.2f}",
            format_bytes(round(start["peak_rss_bytes"])),
        )
        for name, engine in result["engines"].items()
        for kind, start in (("cold", engine["cold"]), (f"median of {runs}", engine["median"]))
    ]
    if ratios := result["ratios"]:
        first, end, peak = (f"{ratio:.2f}" for ratio in ratios.values())
        rows.append(("times better than versus", "", first, end, peak))
    columns = ("first token, s", "end, s", "peak memory")
    print_table(("engine", "run", *columns), rows, numbers=columns)


@command.command()
@click.argument("model", default=None, required=False)
@click.option("--op", "wanted", multiple=True, metavar="NAME", help="Only this op; may be repeated.")
@click.option(
    "--shapes",
    default="model",
    show_default=True,
    metavar="model|FILE",
    help='Decodes and prefills of the model; a JSON list of {"num_seqs", "num_tokens", "context"}.',
)
@click.option("--min-time", default=0.1, show_default=True, type=click.FloatRange(0), help="Seconds for each call.")
@click.option("--output", metavar="FILE", help="Write the JSON object here as well.")
@click.option("--png", metavar="FILE", help="Draw a roofline (needs the extra `bench`).")
@engine_options_without("chat_template", "lora", "prefix_caching", "speculative", "seed")
@json_option
def ops(
    model: str | None,
    wanted: tuple[str, ...],
    shapes: str,
    min_time: float,
    output: str | None,
    png: str | None,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """Each op of a device's table by itself, at the shapes of a model's steps: time, GB/s, GFLOP/s.

    An op whose call is repeated goes round the weights and caches of all layers. Bytes count what must be read and
    written once.
    """
    config = engine_config(flags, model=model)
    from .bench_plot import draw_ops, require_matplotlib

    if png:
        require_matplotlib()
    for file in filter(None, (output, png)):
        check_writable(Path(file))

    from .bench_ops import measure_ops, read_loads

    loads = () if shapes == "model" else read_loads(Path(shapes))
    result = measure_ops(config, loads=loads, wanted=wanted, min_time_s=min_time)
    with saved(result, output, png, draw_ops):
        print_json(result) if as_json else _show_ops(result)


def _show_ops(result: dict[str, Any]) -> None:
    click.echo(f"{result['model']} on {result['device']}, {result['dtype']}\n")
    rows = [
        (
            row["op"],
            row["load"],
            row["shape"],
            str(row["calls"]),
            f"{1e6 * row['seconds']:.1f}",
            *("-" if not row[name] else _number(row[name]) for name in ("gb_per_s", "gflop_per_s")),
        )
        for row in result["ops"]
    ]
    columns = ("calls", "us", "GB/s", "GFLOP/s")
    print_table(("op", "load", "shape", *columns), rows, numbers=columns)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in result["not_timed"]:
        by_reason.setdefault((entry["load"] or "all", entry["reason"]), []).append(entry["op"])
    if by_reason:
        click.echo("\nnot timed")
        table = [(load, ", ".join(names), reason) for (load, reason), names in by_reason.items()]
        print_table(("load", "ops", "reason"), table)


_FIGURES = {
    "requests": ("requests",),
    "tokens/s": ("output_tokens_per_s",),
    "ttft p50": ("ttft_ms", "p50"),
    "p95": ("ttft_ms", "p95"),
    "itl p50": ("itl_ms", "p50"),
    "p95 ": ("itl_ms", "p95"),
    "p99": ("itl_ms", "p99"),
    "tpot p50": ("tpot_ms", "p50"),
    "e2e p50": ("e2e_ms", "p50"),
    "p95  ": ("e2e_ms", "p95"),
    "good": ("goodput", "share"),
}
"""Column -> where its figure is; times are milliseconds."""


def _load(level: dict[str, Any]) -> str:
    return f"{level['concurrency']} at a time" if level["concurrency"] else f"{level['rate']:g} a second"


def _row(level: dict[str, Any]) -> list[str]:
    cells = []
    for path in _FIGURES.values():
        value: Any = level
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        cells.append("-" if value is None else _number(value))
    return cells


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _read(path: Path, select: str) -> dict[str, Any]:
    """The selected workloads of a file, and its warm-up if it has one. Raises ConfigError."""
    from .bench_offline import SHAPES, check_requests

    try:
        data = parse_json(path.read_bytes())
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
