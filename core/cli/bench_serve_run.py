"""`headrace bench serve` from its options: which servers, which requests, and what becomes of the result."""

import asyncio
import contextlib
import logging
import math
import os
import platform
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError, HeadraceError
from ..json_text import parse_json
from ..settings import variable_of
from .bench_child import PROGRAM, child_environment
from .bench_client import Target
from .bench_serve import (
    Goodput,
    Level,
    Plan,
    Request,
    measure,
    mixed,
    model_of,
    ratios,
    read_requests,
    synthetic,
)
from .output import check_writable

_logger = logging.getLogger(__name__)

_VOCAB_SIZE = 8000
"""What every language model has at least, nearly."""
_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command, by name."""

    url: str | None
    versus: str | None
    served_model: str | None
    concurrency: str | None
    rate: str | None
    workload: str
    select: str
    num_requests: int | None
    input_len: int
    output_len: int
    spread: float
    repeat: int
    goodput: str | None
    body: str
    vocab_size: int | None
    timeout_s: float
    output: str | None
    png: str | None


def run(config: EngineConfig, options: Options) -> dict[str, Any]:
    """Measure, and return the result. Raises ConfigError before anything is started, HeadraceError if a server cannot
    be reached."""
    levels = _levels(options)
    if not options.timeout_s > 0:  # NaN, too
        raise ConfigError(f"--timeout-s must be above 0, got {options.timeout_s:g}")
    for file in filter(None, (options.output, options.png)):
        check_writable(Path(file))
    goodput = Goodput.parse(options.goodput) if options.goodput else None
    common = _json_object(options.body)
    if options.png:
        from .bench_plot import require_matplotlib

        require_matplotlib()
    requests = _requests(config, options, levels)
    plan = Plan(
        levels=levels,
        requests=requests,
        repeat=options.repeat,
        goodput=goodput,
        seed=config.scheduler.seed,
        timeout_s=options.timeout_s,
    )
    key = config.server.api_key or os.environ.get("OPENAI_API_KEY", "")
    with contextlib.nullcontext(options.url) if options.url else own_server(config) as url:
        targets = {"headrace" if not options.url else "server": Target(url, api_key=key)}
        if options.versus:
            targets["versus"] = Target(options.versus, api_key=key)
        result = asyncio.run(_measure(plan, targets, options, common, key))
    return result


async def _measure(
    plan: Plan, targets: Mapping[str, Target], options: Options, common: Mapping[str, Any], key: str
) -> dict[str, Any]:
    from headrace import __version__

    models = {name: options.served_model or await model_of(target, key) for name, target in targets.items()}
    fields = {name: (target, {"model": models[name], **common}) for name, target in targets.items()}

    def report(name: str, level: Level, found: Mapping[str, Any]) -> None:
        shown = {
            "server": name,
            "load": level.name,
            "tokens_per_s": round(found["output_tokens_per_s"], 1),
            "ttft_p50_ms": round(found["ttft_ms"].get("p50", 0.0), 1),
            "itl_p50_ms": round(found["itl_ms"].get("p50", 0.0), 2),
            "errors": sum(found["errors"].values()),
        }
        _logger.info("measured", extra={"fields": shown})

    servers = await measure(plan, fields, report)
    names = list(servers)
    return {
        "headrace": __version__,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "workload": {
            "name": options.workload,
            "input_len": options.input_len if options.workload == "synthetic" else None,
            "output_len": options.output_len if options.workload == "synthetic" else None,
            "repeat": plan.repeat,
            "seed": plan.seed,
        },
        "models": models,
        "urls": {name: target.url for name, target in targets.items()},
        "servers": servers,
        "ratios": ratios(servers[names[0]], servers[names[1]]) if len(names) == 2 else [],
    }


# ---- options ------------------------------------------------------------------------------------------------
def _levels(options: Options) -> list[Level]:
    if options.concurrency and options.rate:
        raise ConfigError("--concurrency and --rate are two ways to make load; give one")
    try:
        if options.rate:
            levels = [Level(rate=float(part)) for part in options.rate.split(",")]
        else:
            levels = [Level(concurrency=int(part)) for part in (options.concurrency or "1,8,32").split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level.rate < math.inf or level.concurrency > 0 for level in levels):
        raise ConfigError("--concurrency takes whole numbers and --rate numbers above 0, separated by commas")
    return list(dict.fromkeys(levels))


def _requests(config: EngineConfig, options: Options, levels: Sequence[Level]) -> dict[Level, list[Request]]:
    counts = {level: options.num_requests or level.num_requests() for level in levels}
    if options.workload not in ("synthetic", "w5"):
        found = read_requests(Path(options.workload), options.select)
        # A short file is begun again.
        return {level: [found[i % len(found)] for i in range(count)] for level, count in counts.items()}
    vocab_size = options.vocab_size or _vocab_size(config, options)
    seed = config.scheduler.seed
    if options.workload == "w5":
        return {level: mixed(count, vocab_size=vocab_size, seed=seed) for level, count in counts.items()}
    return {
        level: synthetic(
            count, options.input_len, options.output_len, options.spread, vocab_size=vocab_size, seed=seed
        )
        for level, count in counts.items()
    }


def _vocab_size(config: EngineConfig, options: Options) -> int:
    if options.url:
        return _VOCAB_SIZE
    from ..engine.build import describe_model

    vocab_size = describe_model(config, _logger.info).spec.vocab_size
    return vocab_size if not options.versus else min(vocab_size, _VOCAB_SIZE)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--body {text}: not a JSON object")
    return value


# ---- a server of our own --------------------------------------------------------------------------------------
@contextlib.contextmanager
def own_server(config: EngineConfig) -> Iterator[str]:
    """The URL of `headrace serve` with this configuration, on a free port; it ends with the block. Raises
    HeadraceError with the end of its log if it does not become ready."""
    environment = child_environment(config)
    environment[variable_of("port")] = "0"
    environment[variable_of("log_format")] = "text"
    environment[variable_of("log_level")] = "info"
    process = subprocess.Popen(
        [*PROGRAM, "serve"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader: threading.Thread | None = None
    try:
        url = ""
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if found := re.search(r"serving .* at (\S+)$", line):
                url = found[1]
            if url and re.search(r"ready in ", line):
                break
        else:
            raise HeadraceError("the server did not start:\n" + "\n".join(lines[-_LOG_LINES:]))
        # Its log must be read on, or it would wait for room.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader is not None:
            reader.join()
        process.stderr.close()
