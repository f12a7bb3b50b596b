"""The measurements of `headrace bench offline`: fixed workloads, random requests, and the cost of one step."""

import itertools
import logging
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config import EngineConfig
from ..errors import ConfigError
from ..llm import LLM
from ..sampling.params import SamplingParams
from ..stages import EngineRequest, RequestOutput
from .start import start_llm

SHAPES: Mapping[str, Literal["sets", "single", "batch"]] = {
    "W1": "sets",
    "W2": "single",
    "W3": "batch",
    "W3s": "batch",
    "W4": "sets",
}
"""How a workload is laid out: sets of requests, requests that run one by one, or one batch."""

_logger = logging.getLogger(__name__)
Figures = dict[str, float | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Token ids of a prompt, and how many tokens to generate."""

    prompt: tuple[int, ...]
    num_output: int


def open_llm(config: EngineConfig) -> LLM:
    """The engine as a benchmark wants it: token ids in and out."""
    return start_llm(replace(config, model=replace(config.model, skip_tokenizer_init=True)))


def check_requests(data: Any, where: str, *, nested: bool) -> Any:
    """Requests of a workload file, `{"p": [token ids], "n": count}`, in lists or in lists of lists."""
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where} must be a list of requests, and not empty")
    if nested:
        return [check_requests(part, where, nested=False) for part in data]
    requests = []
    for entry in data:
        try:
            request = BenchRequest(prompt=tuple(int(token) for token in entry["p"]), num_output=int(entry["n"]))
        except (TypeError, KeyError, ValueError):
            raise ConfigError(f'{where}: a request is {{"p": [token ids], "n": count}}') from None
        if not request.prompt or request.num_output < 1:
            raise ConfigError(f"{where}: a request needs at least one token of prompt and of output")
        requests.append(request)
    return requests


def measure_workloads(llm: LLM, workloads: Mapping[str, Any], repeat: int, *, rest_s: float = 0) -> dict[str, Any]:
    """Figures of each workload: medians over `repeat` runs (or over sets, where a workload has sets).

    rest_s: seconds before each run in which nothing is asked of the device.
    """
    for request in workloads.get("warm", ()):
        _run(llm, [request], "warm")
    measured: dict[str, Figures] = {}
    for name, requests in workloads.items():
        if name == "warm":
            continue
        _logger.info("running", extra={"fields": {"workload": name}})
        if name == "W1":
            measured[name] = _pairs(llm, requests[: repeat + 1], rest_s)
        elif SHAPES[name] == "single":
            walls = [_run(llm, [one], f"{name}-{i}", rest_s).wall_s for i, one in enumerate(requests[:repeat])]
            measured[name] = {"prefill_tokens_per_s": len(requests[0].prompt) / statistics.median(walls)}
        elif SHAPES[name] == "sets":
            runs = [_run(llm, batch, f"{name}-{i}", rest_s) for i, batch in enumerate(requests[:repeat])]
            measured[name] = _throughput(runs)
        else:
            measured[name] = _throughput([_run(llm, requests, f"{name}-{i}", rest_s) for i in range(repeat)])
    return {**_setup(llm), "repeat": repeat, "workloads": measured}


def measure_random(
    llm: LLM, num_prompts: int, input_len: int, output_len: int, repeat: int, *, seed: int, rest_s: float = 0
) -> dict[str, Any]:
    """Random prompts of one length, all at once: throughput, latency, and the cost of one decode step.

    rest_s: as `measure_workloads`.
    """
    vocab_size = llm.built.model.spec.vocab_size
    numbers = random.Random(seed)
    requests = [
        BenchRequest(
            prompt=tuple(numbers.randrange(vocab_size) for _ in range(input_len)),
            num_output=output_len,
        )
        for _ in range(num_prompts)
    ]
    _run(llm, [replace(request, num_output=2) for request in requests], "warm")
    runs = [_run(llm, requests, f"random-{i}", rest_s) for i in range(repeat)]
    figures = _throughput(runs)
    figures["ttft_ms"] = 1e3 * statistics.median(_ttft_s(output) for run in runs for output in run.outputs)
    measured = {"random": figures, "step": _steps(llm, requests, repeat)}
    size = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    return {**_setup(llm), **size, "repeat": repeat, "workloads": measured}


# ---- runs of whole requests ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    wall_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    outputs: Sequence[RequestOutput]


def _run(llm: LLM, requests: Sequence[BenchRequest], salt: str, rest_s: float = 0) -> _Run:
    """Rest, then run requests together. The salt keeps this run's prefix blocks to itself."""
    time.sleep(rest_s)
    prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    params = [_greedy(request.num_output) for request in requests]
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, cache_salt=salt)
    wall_s = time.perf_counter() - started_s
    for request, output in zip(requests, outputs, strict=True):
        count = len(output.outputs[0].token_ids)
        assert count == request.num_output, f"asked for {request.num_output} tokens, got {count}"
    return _Run(
        wall_s=wall_s,
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_output_tokens=sum(request.num_output for request in requests),
        outputs=outputs,
    )


def _pairs(llm: LLM, pairs: Sequence[Sequence[BenchRequest]], rest_s: float) -> Figures:
    """Pairs of a one-token probe and a full request, one stream; the first pair warms up."""
    ttft_s, rates = [], []
    for index, (probe, full) in enumerate(pairs):
        probe_s = _run(llm, [probe], f"W1-{index}", rest_s).wall_s
        full_s = _run(llm, [full], f"W1-{index}").wall_s
        ttft_s.append(probe_s)
        rates.append((full.num_output - probe.num_output) / max(full_s - probe_s, 1e-9))
    kept = slice(1, None) if len(pairs) > 1 else slice(None)
    return {"ttft_ms": 1e3 * statistics.median(ttft_s[kept]), "decode_tokens_per_s": statistics.median(rates[kept])}


def _throughput(runs: Sequence[_Run]) -> Figures:
    return {
        "wall_s": statistics.median(run.wall_s for run in runs),
        "output_tokens_per_s": statistics.median(run.num_output_tokens / run.wall_s for run in runs),
        "total_tokens_per_s": statistics.median(
            (run.num_prompt_tokens + run.num_output_tokens) / run.wall_s for run in runs
        ),
    }


def _ttft_s(output: RequestOutput) -> float:
    timings = output.timings
    assert timings is not None and timings.first_token_s is not None, "a finished request has its times"
    return timings.first_token_s - timings.arrival_s


def _greedy(num_output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)


def _setup(llm: LLM) -> dict[str, Any]:
    from headrace import __version__

    built = llm.built
    return {
        "headrace": __version__,
        "model": built.model.name,
        **{choice.name: choice.value for choice in built.choices if choice.name in ("device", "dtype")},
        **built.device.describe(),
    }


# ---- one step -----------------------------------------------------------------------------------------------
def _steps(llm: LLM, requests: Sequence[BenchRequest], repeat: int) -> Figures:
    """Microseconds of one step in which all requests decode, and where they went.

    schedule and commit are the scheduler's. runner builds the batch and runs the device's step, which is next to
    nothing on the null platform. output is what is left of an engine step: making RequestOutputs.
    """
    whole: list[float] = []
    parts: list[tuple[float, float, float]] = []
    for run in range(repeat):
        whole += _engine_steps(llm, requests, f"step-{run}")
        parts += _bare_steps(llm, requests, f"bare-{run}")
    figures: Figures = {"num_reqs": len(requests), "steps": len(whole)}
    if whole and parts:
        medians = [1e6 * statistics.median(seconds) for seconds in zip(*parts, strict=True)]
        figures["step_us"] = 1e6 * statistics.median(whole)
        figures.update(zip(("schedule_us", "runner_us", "commit_us"), medians, strict=True))
        figures["output_us"] = figures["step_us"] - sum(medians)
    return figures


def _engine_steps(llm: LLM, requests: Sequence[BenchRequest], name: str) -> list[float]:
    """Seconds of each engine step in which every request decodes one token."""
    engine, seconds = llm.built.engine, []
    for index, request in enumerate(requests):
        engine.add(f"{name}-{index}", request.prompt, _greedy(request.num_output), cache_salt=name)
    decoding: set[str] = set()
    while engine.has_unfinished():
        started_s = time.perf_counter()
        outputs = engine.step()
        step_s = time.perf_counter() - started_s
        if len(decoding) == len(outputs) == len(requests) and not any(output.finished for output in outputs):
            seconds.append(step_s)
        decoding.update(output.request_id for output in outputs)
    return seconds


def _bare_steps(llm: LLM, requests: Sequence[BenchRequest], name: str) -> list[tuple[float, float, float]]:
    """(schedule, runner, commit) seconds of the same steps, from the scheduler and the executor alone."""
    engine, seconds = llm.built.engine, []
    scheduler, executor = engine.scheduler, engine.executor
    for index, request in enumerate(requests):
        scheduler.add(
            EngineRequest(
                request_id=f"{name}-{index}",
                prompt_token_ids=request.prompt,
                sampling_params=_greedy(request.num_output),
                arrival_s=engine.clock.now_s(),
                cache_salt=name,
            )
        )
    while scheduler.has_unfinished():
        times = [time.perf_counter()]
        plan = scheduler.schedule()
        times.append(time.perf_counter())
        assert plan is not None, "nothing is in flight, so unfinished requests can be scheduled"
        result = executor.submit(plan).result()
        times.append(time.perf_counter())
        deltas = scheduler.commit(plan, result)
        times.append(time.perf_counter())
        all_decode = len(plan.rows) == len(requests) and all(row.num_tokens == 1 for row in plan.rows)
        if all_decode and not plan.new and not any(delta.finish_reason for delta in deltas):
            scheduled, ran, committed = (after - before for before, after in itertools.pairwise(times))
            seconds.append((scheduled, ran, committed))
    return seconds
