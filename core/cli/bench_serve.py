"""The measurements of `headrace bench serve`: requests, how they arrive, and the figures of a round."""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HeadraceError
from ..json_text import parse_json
from .bench_client import Sample, Target

PERCENTILES = (50, 90, 95, 99)
_FIRST_TOKEN = 1000
"""Random prompts leave the ids below it alone: special tokens are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: where it goes, and its body without what all have in common."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How requests arrive: so many at a time, or so many a second at random (a Poisson process)."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """As tables and pictures have it."""
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} a second"

    def num_requests(self) -> int:
        """How many are enough, if nobody says."""
        if self.concurrency:
            return {1: 6, 8: 24}.get(self.concurrency, 2 * self.concurrency)
        return max(20, math.ceil(30 * self.rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What a request must keep to, in seconds, to count as good."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Goodput":
        """Of `ttft:300,tpot:50`, in milliseconds. Raises ConfigError."""
        limits = {}
        for part in filter(None, text.replace(" ", ",").split(",")):
            name, _, value = part.partition(":")
            try:
                limits[f"{name}_s"] = float(value) / 1000
                cls(**limits)
            except (TypeError, ValueError):
                raise ConfigError(f"--goodput {part}: write ttft:MS, tpot:MS or e2e:MS") from None
        return cls(**limits)

    def is_kept(self, sample: Sample) -> bool:
        """True if the request was fast enough."""
        return sample.ttft_s <= self.ttft_s and (sample.tpot_s or 0.0) <= self.tpot_s and sample.e2e_s <= self.e2e_s


# ---- requests -----------------------------------------------------------------------------------------------
def synthetic(
    count: int, input_len: int, output_len: int, spread: float, *, vocab_size: int, seed: int
) -> list[Request]:
    """Random token ids; lengths are even between (1 - spread) and (1 + spread) times the given ones."""
    numbers = random.Random(seed)

    def length(middle: int) -> int:
        return max(1, round(middle * numbers.uniform(1 - spread, 1 + spread)))

    return [_random(numbers, length(input_len), length(output_len), vocab_size) for _ in range(count)]


def mixed(count: int, *, vocab_size: int, seed: int) -> list[Request]:
    """W5: prompts as people write them (log-normal: half are below 112 tokens, some have 1024), 64 tokens each."""
    numbers = random.Random(seed)
    lengths = [round(112 * math.exp(numbers.gauss(0, 1))) for _ in range(count)]
    return [_random(numbers, max(16, min(1024, length)), 64, vocab_size) for length in lengths]


def _random(numbers: random.Random, num_prompt: int, num_output: int, vocab_size: int) -> Request:
    first = min(_FIRST_TOKEN, vocab_size // 2)
    return _completion([numbers.randrange(first, vocab_size) for _ in range(num_prompt)], num_output)


def _completion(prompt: Any, num_output: int) -> Request:
    exact = {"max_tokens": num_output, "min_tokens": num_output, "ignore_eos": True}
    return Request(path="/completions", body={"prompt": prompt, "temperature": 0, **exact})


def read_requests(path: Path, select: str) -> list[Request]:
    """The requests of a file: JSON lines with a body of a request each (or OpenAI's batch format), or one JSON object
    with lists of {"p": token ids, "n": count} by name. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from None
    try:
        lists = parse_json(text)
    except ValueError:
        lists = None
    if isinstance(lists, dict) and select in lists:
        lines = lists[select]
    elif isinstance(lists, dict) and not {"prompt", "messages", "body", "p"} & lists.keys():
        raise ConfigError(f"{path} has no workload {select!r}; it has {', '.join(lists) or 'none'}")
    else:
        try:
            lines = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from None
    requests = [_read_request(line, f"{path}: request {number}") for number, line in enumerate(lines, 1)]
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests


def _read_request(line: Any, where: str) -> Request:
    body = line.get("body", line) if isinstance(line, dict) else None
    if isinstance(body, dict) and isinstance(body.get("p"), list) and isinstance(body.get("n"), int):
        return _completion(body["p"], body["n"])
    if isinstance(body, dict) and "messages" in body:
        return Request(path="/chat/completions", body=body)
    if isinstance(body, dict) and "prompt" in body:
        return Request(path="/completions", body=body)
    raise ConfigError(f'{where} has neither "messages" nor "prompt" nor "p" and "n"')


def salted(requests: Sequence[Request], salt: int) -> list[Request]:
    """The requests with another beginning, so that they hit nothing of an earlier round in a prefix cache; what they
    share among themselves they still share. Token ids keep their number: the first one changes. A text gets the salt
    ahead of it."""
    ids = [request.body["prompt"] for request in requests if _is_ids(request.body.get("prompt"))]
    bound = max(1, min((max(prompt) for prompt in ids), default=1) // 2)  # a first token that the vocabulary has
    return [_salted(request, salt, bound + salt % bound) for request in requests]


def _salted(request: Request, salt: int, first_id: int) -> Request:
    body = dict(request.body)
    prompt = body.get("prompt")
    if request.path == "/chat/completions":
        first, *others = body["messages"]
        if isinstance(first.get("content"), str):
            body["messages"] = [{**first, "content": f"({salt}) {first['content']}"}, *others]
    elif isinstance(prompt, str):
        body["prompt"] = f"({salt}) {prompt}"
    elif _is_ids(prompt):
        body["prompt"] = [first_id, *body["prompt"][1:]]
    return Request(path=request.path, body=body)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


# ---- a round ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one level's requests came to on one server."""

    wall_s: float
    cpu_s: float
    """that the measuring process itself took"""
    samples: Sequence[Sample]


async def run_round(
    target: Target,
    level: Level,
    requests: Sequence[Request],
    *,
    common: Mapping[str, Any],
    seed: int,
    timeout_s: float,
) -> Round:
    """Send the requests as the level says and wait for all of them."""
    samples: list[Sample] = []
    pending = iter(requests)

    async def send(request: Request) -> None:
        body = {**request.body, **common, "stream": True, "stream_options": {"include_usage": True}}
        samples.append(await target.post(request.path, body, timeout_s))

    async def user() -> None:
        for request in pending:
            await send(request)

    started_s, cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        if level.concurrency:
            for _ in range(level.concurrency):
                group.create_task(user())
        else:
            due_s = started_s
            for request, gap_s in zip(pending, poisson_gaps(level.rate, seed), strict=False):
                group.create_task(send(request))
                due_s += gap_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    cpu_s = time.process_time() - cpu_s
    wall_s = max((sample.ended_s for sample in samples), default=started_s) - started_s
    return Round(wall_s=wall_s, cpu_s=cpu_s, samples=samples)


def poisson_gaps(rate: float, seed: int) -> Iterator[float]:
    """Seconds from each arrival to the next, for ever, of a Poisson process of `rate` arrivals a second."""
    numbers = random.Random(seed)
    while True:
        yield numbers.expovariate(rate)


def figures(round_: Round, goodput: Goodput | None) -> dict[str, Any]:
    """Times in milliseconds, rates per second of wall time. Failed requests count as errors and in nothing else."""
    good = [sample for sample in round_.samples if not sample.error]
    wall_s = max(round_.wall_s, 1e-9)
    num_prompt = sum(sample.num_prompt_tokens for sample in good)
    num_output = sum(sample.num_output_tokens for sample in good)
    found: dict[str, Any] = {
        "requests": len(round_.samples),
        "errors": dict(Counter(sample.error for sample in round_.samples if sample.error).most_common()),
        "wall_s": round_.wall_s,
        "requests_per_s": len(good) / wall_s,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / wall_s,
        "total_tokens_per_s": (num_prompt + num_output) / wall_s,
        "ttft_ms": percentiles([sample.ttft_s for sample in good]),
        "itl_ms": percentiles(list(itertools.chain.from_iterable(sample.itl_s for sample in good))),
        "tpot_ms": percentiles([tpot_s for sample in good if (tpot_s := sample.tpot_s) is not None]),
        "e2e_ms": percentiles([sample.e2e_s for sample in good]),
        "client_cpu_share": round_.cpu_s / wall_s,
    }
    if goodput is not None:
        kept = sum(goodput.is_kept(sample) for sample in good)
        found["goodput"] = {"requests_per_s": kept / wall_s, "share": kept / max(1, len(round_.samples))}
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds, linear between ranks; empty if there is nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def at(percent: float) -> float:
        place = (len(ordered) - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return 1e3 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))

    return {"mean": 1e3 * sum(ordered) / len(ordered), **{f"p{percent}": at(percent) for percent in PERCENTILES}}


# ---- all rounds ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    levels: Sequence[Level]
    requests: Mapping[Level, Sequence[Request]]
    repeat: int
    goodput: Goodput | None
    seed: int
    timeout_s: float


async def measure(plan: Plan, targets: Mapping[str, tuple[Target, Mapping[str, Any]]], report: Any) -> dict[str, Any]:
    """All levels on all targets, by turns: what changes on the machine meanwhile meets all of them.

    targets: name -> address, and the fields that each request to it has. Each round starts with prompts that no
    cache knows. Returns per target and level the medians over the rounds, and the rounds themselves.
    """
    rounds: dict[str, dict[Level, list[dict[str, Any]]]] = {
        name: {level: [] for level in plan.levels} for name in targets
    }
    salts = itertools.count(plan.seed % 10_000 * 1000 + 1)
    for name, (target, common) in targets.items():
        warm = await target.post("/completions", {**common, **_WARM}, plan.timeout_s)
        if warm.error:
            raise HeadraceError(f"{name} at {target.url} does not answer: {warm.error}")
    for repetition in range(plan.repeat):
        for level in plan.levels:
            order = list(targets.items())
            for name, (target, common) in order if repetition % 2 == 0 else reversed(order):
                requests = salted(plan.requests[level], next(salts))
                done = await run_round(
                    target, level, requests, common=common, seed=plan.seed, timeout_s=plan.timeout_s
                )
                rounds[name][level].append(figures(done, plan.goodput))
                report(name, level, rounds[name][level][-1])
    return {
        name: [
            {"concurrency": level.concurrency or None, "rate": level.rate or None, **medians(found), "rounds": found}
            for level, found in by_level.items()
        ]
        for name, by_level in rounds.items()
    }


_WARM = {"prompt": "Once upon a time", "max_tokens": 4, "stream": True, "temperature": 0}


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure over rounds; errors are added up."""
    found: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [each[name] for each in rounds if each.get(name) not in (None, {})]
        if name == "errors":
            total: Counter[str] = Counter()
            for each in rounds:
                total.update(each["errors"])
            found[name] = dict(total)
        elif isinstance(first, Mapping):
            found[name] = {key: _median([value[key] for value in values]) for key in (values[0] if values else ())}
        else:
            found[name] = sum(values) if name == "requests" else _median(values)
    return found


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times better the first is, level by level, from medians: above 1 is better in each figure."""
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        row: dict[str, Any] = {"concurrency": mine["concurrency"], "rate": mine["rate"]}
        if mine["output_tokens_per_s"] and other["output_tokens_per_s"]:
            row["output_tokens_per_s"] = mine["output_tokens_per_s"] / other["output_tokens_per_s"]
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            if mine[name] and other[name]:
                row[name] = {key: other[name][key] / max(mine[name][key], 1e-9) for key in ("p50", "p95")}
        found.append(row)
    return found


def _median(values: Sequence[float]) -> float:
    return percentiles(values)["p50"] / 1e3 if values else 0.0


async def model_of(target: Target, api_key: str) -> str:
    """The first model that a server lists. Raises HeadraceError."""
    from .remote import RemoteChat

    def ask() -> str:
        return RemoteChat(target.url, api_key=api_key).model

    return await asyncio.get_running_loop().run_in_executor(None, ask)
