"""A tiny model and a driver that feeds a Runner by hand: `doctor` and the conformance kit try devices with them."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .config import EngineConfig
from .conformance import Check
from .errors import HeadraceError
from .kv.groups import kv_groups
from .models.declare import declare_params
from .models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from .platform import Device, Pending, Runner, RunnerConfig
from .stages import ForwardBatch, IntArray, SamplingBatch, StepInput, StepOutput
from .units import format_bytes
from .weights.dummy import DummyParams
from .weights.source import HostTensor, ParamSource

TOLERANCE: Mapping[str, float] = {"float64": 1e-20, "float32": 1e-9, "float16": 5e-6, "bfloat16": 1e-4}
"""Normalised mean square error that an op may have against float64, by dtype."""
UNKNOWN = -1
"""A token that a step in flight will sample."""


def tiny_spec(*, window: int = 0, softcap: float = 0.0, num_layers: int = 2) -> ModelSpec:
    """A model of some 100,000 parameters with grouped queries. With a window, every second layer has it."""

    def layer(index: int) -> LayerSpec:
        attn = AttentionSpec(
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            scale=0.25,
            rope=RopeSpec(rotary_dim=16),
            window=window if index % 2 else 0,
            softcap=softcap,
        )
        return LayerSpec(attn=attn, mlp=MlpSpec(intermediate_size=96))

    return ModelSpec(
        model_type="tiny",
        vocab_size=211,
        hidden_size=64,
        max_position_embeddings=512,
        layers=tuple(layer(i) for i in range(num_layers)),
        norm=NormSpec(),
    )


def tiny_config(spec: ModelSpec, *, dtype: str = "float32", block_size: int = 16) -> RunnerConfig:
    """What a runner needs to know to serve a few short requests of `spec`."""
    return RunnerConfig(
        spec=spec,
        dtype=dtype,
        groups=kv_groups(spec, spec.max_position_embeddings),
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=spec.max_position_embeddings,
        engine=EngineConfig(),
    )


def dummy_weights(spec: ModelSpec) -> ParamSource:
    """Random matrices; norm weights of one and biases of zero."""
    return DummyParams(declare_params(spec), seed=0, dtype="float32")


Weights = Callable[[ModelSpec], ParamSource]


def load_runner(device: Device, config: RunnerConfig, *, params: Weights = dummy_weights) -> Runner:
    """A runner with weights that are the same on every device."""
    runner = device.runner(config)
    runner.load(params(config.spec))
    return runner


def place_of(device: Device) -> str:
    """What ops that make arrays take as `device`."""
    return str(getattr(device, "torch_device", device.info.id))


def nmse(result: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Normalised mean square error: sum of squared differences over the sum of squares; inf for NaN or infinity."""
    got, want = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape} is not {want.shape}"
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.square(got - want).sum() / max(float(np.square(want).sum()), 1e-30))


@dataclass(slots=True, kw_only=True)
class DrivenRequest:
    """One request of a Driver; its slot is its index. token_ids grows by what is sampled, out of `allowed` if it
    names tokens."""

    token_ids: list[int]
    temperature: float = 0.0
    seed: int = 0
    allowed: Sequence[int] = ()
    num_computed: int = 0
    num_steps: int = 0
    block_ids: list[list[int]] = field(default_factory=list)


class Driver:
    """Requests on one runner, stepped as the caller says; blocks are handed out in random order, never block 0."""

    def __init__(self, runner: Runner, config: RunnerConfig, *, num_blocks: int = 64, seed: int = 0) -> None:
        self.runner = runner
        self.config = config
        self.requests: list[DrivenRequest] = []
        self._free = [list(range(1, num_blocks)) for _ in config.groups]
        for group, free in enumerate(self._free):
            random.Random(2 * group + seed).shuffle(free)
        runner.kv_init([num_blocks] * len(config.groups))
        runner.warmup()

    def add(
        self, token_ids: Sequence[int], *, temperature: float = 0.0, seed: int = 0, allowed: Sequence[int] = ()
    ) -> int:
        """A new request; returns its index."""
        self.requests.append(
            DrivenRequest(token_ids=list(token_ids), temperature=temperature, seed=seed, allowed=allowed)
        )
        return len(self.requests) - 1

    def remove(self, index: int) -> None:
        """End a request; its blocks are the next ones to be used again, dirty as they are."""
        request = self.requests[index]
        for free, block_ids in zip(self._free, request.block_ids, strict=False):
            free.extend(block_ids)
        request.block_ids = []

    def remove_all(self) -> None:
        """Forget the requests; their blocks are used again, dirty as they are."""
        for index in range(len(self.requests)):
            self.remove(index)
        self.requests.clear()

    def step(self, counts: Mapping[int, int], *, num_logprobs: int = -1) -> StepOutput:
        """Compute `counts[index]` more tokens of each request named; one whose tokens are all computed samples.

        Output rows are in the order of `counts`, of those that sample.
        """
        sampling = self._sampling(counts)
        output = self.submit(counts, num_logprobs=num_logprobs).result()
        for index, token_id in zip(sampling, output.token_ids.tolist(), strict=True):
            request = self.requests[index]
            request.token_ids[request.token_ids.index(UNKNOWN)] = token_id
        return output

    def submit(self, counts: Mapping[int, int], *, num_logprobs: int = -1) -> Pending:
        """Begin a step; each request that samples gets an UNKNOWN token, which the next step may already read."""
        return self.runner.step(self.prepare(counts, num_logprobs=num_logprobs))

    def prepare(self, counts: Mapping[int, int], *, num_logprobs: int = -1) -> StepInput:
        """The step that `submit` begins, for a caller who changes it first."""
        sampling = self._sampling(counts)
        batch = self._batch(counts, sampling, num_logprobs)
        for index, count in counts.items():
            self.requests[index].num_computed += count
            self.requests[index].num_steps += 1
        for index in sampling:
            self.requests[index].token_ids.append(UNKNOWN)
        return batch

    def generate(self, prompt: Sequence[int], num_tokens: int, *, chunk: int = 0) -> list[int]:
        """Greedy tokens of one request alone; chunk: tokens of the prompt in one step, 0 takes all at once."""
        index = self.add(prompt)
        request = self.requests[index]
        while len(request.token_ids) < len(prompt) + num_tokens:
            left = len(request.token_ids) - request.num_computed
            self.step({index: min(left, chunk or left)})
        return request.token_ids[len(prompt) :]

    def _sampling(self, counts: Mapping[int, int]) -> list[int]:
        return [
            index
            for index, count in counts.items()
            if self.requests[index].num_computed + count == len(self.requests[index].token_ids)
        ]

    def _batch(self, counts: Mapping[int, int], sampling: Sequence[int], num_logprobs: int) -> StepInput:
        size, groups = self.config.block_size, range(len(self.config.groups))
        requests = {index: self.requests[index] for index in counts}
        for index, request in requests.items():
            self._grow(request, request.num_computed + counts[index])
        spans = {i: range(r.num_computed, r.num_computed + counts[i]) for i, r in requests.items()}
        positions = np.array([p for span in spans.values() for p in span], np.int32)
        token_ids = [r.token_ids[p] for i, r in requests.items() for p in spans[i]]
        starts = np.cumsum([0, *counts.values()]).astype(np.int32)
        width = max((len(r.block_ids[0]) for r in requests.values()), default=1)
        tables = [np.full((len(requests), width), -1, np.int32) for _ in groups]
        slots = [np.empty(len(positions), np.int32) for _ in groups]
        for row, (index, request) in enumerate(requests.items()):
            for group in groups:
                block_ids = np.array(request.block_ids[group], np.int32)
                if self.config.groups[group].kind == "state":
                    # By turns in two blocks: a state that is read is not written.
                    before, after = block_ids[:2] if request.num_steps % 2 else block_ids[1::-1]
                    tables[group][row, 0] = before if spans[index].start else -1
                    slots[group][starts[row] : starts[row + 1]] = -1
                    slots[group][starts[row + 1] - 1] = after
                    continue
                tables[group][row, : len(block_ids)] = block_ids
                span = np.array(spans[index], np.int32)
                slots[group][starts[row] : starts[row + 1]] = block_ids[span // size] * size + span % size
        rows = list(requests)
        forward = ForwardBatch(
            input_ids=np.array(token_ids, np.int32),
            positions=positions,
            query_start_loc=starts,
            seq_lens=np.array([span.stop for span in spans.values()], np.int32),
            block_tables=tables,
            slot_mappings=slots,
            logits_indices=np.array([starts[rows.index(index) + 1] - 1 for index in sampling], np.int32),
            token_slots=np.repeat(np.array(rows, np.int32), list(counts.values())) if UNKNOWN in token_ids else None,
            max_query_len=max(counts.values()),
            max_seq_len=max(span.stop for span in spans.values()),
        )
        return StepInput(forward=forward, sampling=self._sampling_batch(sampling, num_logprobs) if sampling else None)

    def _sampling_batch(self, sampling: Sequence[int], num_logprobs: int) -> SamplingBatch:
        requests = [self.requests[index] for index in sampling]
        temperature = np.array([request.temperature for request in requests], np.float32)
        return SamplingBatch(
            rows=np.arange(len(sampling), dtype=np.int32),
            slots=np.array(sampling, np.int32),
            positions=np.array([len(request.token_ids) for request in requests], np.int32),
            seeds=np.array([request.seed for request in requests], np.int32),
            temperature=temperature if temperature.any() else None,
            allow_mask=self._mask(requests) if any(request.allowed for request in requests) else None,
            num_logprobs=num_logprobs,
        )

    def _mask(self, requests: Sequence[DrivenRequest]) -> IntArray:
        """One bit a token, as grammars give them."""
        vocab_size = self.config.spec.vocab_size
        bits = np.zeros((len(requests), -(-vocab_size // 32) * 32), np.uint8)
        for row, request in zip(bits, requests, strict=True):
            row[list(request.allowed) or slice(vocab_size)] = 1
        return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)

    def _grow(self, request: DrivenRequest, num_tokens: int) -> None:
        request.block_ids = request.block_ids or [[] for _ in self._free]
        for group, free, block_ids in zip(self.config.groups, self._free, request.block_ids, strict=True):
            needed = 2 if group.kind == "state" else -(-num_tokens // self.config.block_size)
            while len(block_ids) < needed:
                block_ids.append(free.pop())


def self_test(device: Device) -> Iterator[Check]:
    """Use an opened device for real: memory, a matrix product, KV blocks, tokens of a tiny model."""
    dtype = device.caps.dtypes[0]
    memory = device.memory()
    sane = 0 <= memory.free_bytes <= memory.total_bytes and memory.total_bytes > 0
    yield Check(
        name="memory",
        outcome="passed" if sane else "failed",
        detail=f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free",
    )
    config = tiny_config(tiny_spec(), dtype=dtype, block_size=(device.caps.block_sizes or (16,))[0])
    runner: Runner | None = None
    for name, part in (("load", _load), ("matmul", _matmul), ("generate", _generate)):
        try:
            if runner is None:
                runner = load_runner(device, config)
            yield part(name, device, runner, config)
        except HeadraceError as error:
            yield Check(name=name, outcome="failed", detail=error.reason)
        except Exception as error:  # noqa: BLE001 - the test's result is that the device raised it
            yield Check(name=name, outcome="failed", detail=f"{type(error).__name__}: {error}")
        if runner is None:
            return
    if runner is not None:
        runner.close()


def _load(name: str, device: Device, runner: Runner, config: RunnerConfig) -> Check:
    params = declare_params(config.spec)
    count = sum(param.num_elements for param in params)
    return Check(name=name, outcome="passed", detail=f"{len(params)} tensors, {count} values in {config.dtype}")


def _matmul(name: str, device: Device, runner: Runner, config: RunnerConfig) -> Check:
    if runner.ops is None:
        return Check(name=name, outcome="unsupported", detail="its runner brings no table of ops")
    ops, generator = runner.ops, np.random.default_rng(0)
    weight = generator.standard_normal((320, 256), np.float32)
    x = generator.standard_normal((24, 256), np.float32)
    tensor = HostTensor(name="weight", dtype="float32", shape=weight.shape, data=weight)
    packed = ops.pack_linear([tensor], dtype=config.dtype, device=place_of(device))
    start_s = time.perf_counter()
    y = ops.linear(ops.cast(ops.to_device(x), dtype=config.dtype), packed)
    result = ops.to_host(ops.cast(y, dtype="float32"))
    took_ms = 1000 * (time.perf_counter() - start_s)
    error = nmse(result, x.astype(np.float64) @ weight.T.astype(np.float64))
    limit = TOLERANCE[config.dtype]
    detail = f"24 x 256 x 320 in {config.dtype}: error {error:.1e}, allowed {limit:.0e}; {took_ms:.2f} ms"
    return Check(name=name, outcome="passed" if error <= limit else "failed", detail=detail)


def _generate(name: str, device: Device, runner: Runner, config: RunnerConfig) -> Check:
    driver = Driver(runner, config)
    prompt = [(7 * i + 3) % config.spec.vocab_size for i in range(20)]
    start_s = time.perf_counter()
    first = driver.generate(prompt, 16)
    took_ms = 1000 * (time.perf_counter() - start_s)
    driver.remove_all()
    second = driver.generate(prompt, 16)
    if first != second or not all(0 <= token_id < config.spec.vocab_size for token_id in first):
        return Check(name=name, outcome="failed", detail=f"one prompt gave {first} and then {second}")
    return Check(name=name, outcome="passed", detail=f"16 tokens in {took_ms:.1f} ms, twice the same")
