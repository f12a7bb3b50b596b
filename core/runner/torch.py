"""The stock runner for devices that torch drives: an op table, eager execution, torch's allocator."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import OutOfMemory
from ..kv.groups import kv_groups
from ..ops import OpTable, Selection, select_ops
from ..platform import Caps, Device, DeviceInfo, KVPlan, Memory, OpContext, Pending, Runner, RunnerConfig
from ..sampling.sampler import Sampled
from ..stages import (
    Array,
    ForwardBatch,
    IntArray,
    KVCaches,
    LateArray,
    LogprobArrays,
    PoolingBatch,
    PromptLogprobsBatch,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from ..units import format_bytes
from ..weights.source import ParamSource
from .caches import image_row_size, new_caches
from .collectives import Group, mark_cut, rank_ops
from .done import Done
from .packed import cut, join, pack
from .params import put_param
from .sharding import Share
from .step import StepArrays, prompt_logprobs, prompt_pieces, run_step


class TorchDevice(Device):
    """A device that torch can address. Platforms subclass it and say what they do better.

    torch_device: what torch calls it, such as "cpu" or a name with an index.
    """

    collectives: str = "gloo"
    """torch.distributed's name of what moves data between ranks"""
    ranks: Sequence[str] = ()
    """--device of each rank, if there are several; the first is this one"""
    group: Group | None = None
    share: Share | None = None
    """of the model, in a process that is one of several ranks"""

    def __init__(self, *, info: DeviceInfo, caps: Caps, torch_device: str) -> None:
        self.info = info
        self.caps = caps
        self.torch_device = torch_device

    @property
    def tp_size(self) -> int:
        """Ranks over which a model is cut."""
        return max(1, len(self.ranks))

    def runner(self, config: RunnerConfig) -> Runner:
        """A runner over this device's op providers, or over those of all ranks."""
        if not self.ranks:
            return self.own_runner(config)
        from .ranked import RankedRunner

        return RankedRunner(config, self)

    def own_runner(self, config: RunnerConfig) -> "TorchRunner":
        """The runner of this process; of a model of no family, one over its own code."""
        if config.spec.foreign is not None:
            from ..foreign.runner import ForeignRunner

            return ForeignRunner(config, self)
        return TorchRunner(config, self)

    def collective(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What a collective gives this rank for its array; all ranks must call it."""
        assert self.group is not None, "a collective is between ranks"
        with torch.inference_mode():
            result = getattr(self.group, name)(torch.from_numpy(array).to(self.torch_device, copy=True))
        host: npt.NDArray[Any] = result.cpu().numpy()
        return host

    def activate(self) -> None:
        """Make what this thread does next go to this device, where a process may have several of a type."""

    def memory(self) -> Memory:
        """Memory by torch's device-neutral interface."""
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return Memory(total_bytes=total, free_bytes=free, used_bytes=total - free)


class TorchRunner(Runner):
    """One model on one torch device. Owns parameters and KV caches; nothing else writes them."""

    takes_late_masks = True

    def __init__(self, config: RunnerConfig, device: TorchDevice) -> None:
        device.activate()  # providers try their kernels
        if device.share is not None:
            spec = device.share.spec
            config = dataclasses.replace(
                config, spec=spec, groups=kv_groups(spec, config.max_model_len, config.num_draft_tokens)
            )
        self.config = config
        self.device = device
        context = OpContext(
            spec=config.spec, dtype=config.dtype, block_size=config.block_size, kv_dtype=config.kv_dtype
        )
        providers = (*device.providers(), *device.extra_providers)
        table, self.selections = select_ops(providers, context, wishes=config.engine.device.op_providers)
        self.plain_ops = _bind_device(table, device.torch_device)
        self.ops: OpTable = _with_collectives(self.plain_ops, device)
        self._params: dict[str, Array] = {}
        self._kv: KVCaches | None = None
        self._last_tokens: Array = None

    @property
    def op_selections(self) -> tuple[Selection, ...]:
        """Which provider serves each op, and why others declined."""
        return self.selections

    def load(self, params: ParamSource) -> None:
        """Pack or upload each declared parameter as it comes from the checkpoint."""
        self.device.activate()
        with memory_errors("weights"), torch.inference_mode():
            for loaded in params:
                param, device = loaded.param, self.device
                packed = put_param(self.ops, loaded, dtype=self.config.dtype, device=device.torch_device)
                self._params[param.name] = packed if device.share is None else mark_cut(packed, param, device.share)

    def load_adapter(self, number: int, params: ParamSource) -> None:
        """Copy each matrix into its stack, behind whatever the device has yet to do."""
        self.device.activate()
        with memory_errors("an adapter"), torch.inference_mode():
            for loaded in params:
                one = self.ops.pack_stacked(
                    loaded.tensors, num_stacked=1, dtype=self.config.dtype, device=self.device.torch_device
                )
                self._params[loaded.param.name][number].copy_(one[0])

    def kv_plan(self) -> KVPlan:
        """Bytes of one block: keys and values of all layers of a group."""
        return KVPlan(block_size=self.config.block_size, block_bytes=self.config.block_bytes())

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate the caches layer by layer; `num_blocks` includes the null block."""
        self._kv = None
        self.device.activate()
        plan = self.kv_plan()
        total = sum(n * size for n, size in zip(num_blocks, plan.block_bytes, strict=True))
        with memory_errors(f"a KV cache of {format_bytes(total)}"), torch.inference_mode():
            self._kv = new_caches(
                self.ops,
                self.config.groups,
                num_blocks,
                num_layers=self.config.spec.num_layers,
                block_size=self.config.block_size,
                dtype=self.config.dtype,
                kv_dtype=self.config.kv_dtype,
                device=self.device.torch_device,
                num_image_rows=self.config.num_image_rows,
                image_row_size=image_row_size(self.config.spec),
            )
            # One more than there are slots: where the slot -1 of a padded step lands.
            self._last_tokens = self.ops.to_device(np.zeros(self.config.max_num_seqs + 1, np.int32))

    def warmup(self) -> None:
        """Run one token through the model, into the null block, so that the first request pays for nothing."""
        self.warm_step(1)

    def warm_step(self, num_tokens: int) -> None:
        """Run a step of prompts whose tokens are stored nowhere."""
        config = self.config
        lens = np.full(-(-num_tokens // config.max_model_len), config.max_model_len, np.int32)
        lens[-1] = num_tokens - (len(lens) - 1) * config.max_model_len
        ends, most = lens.cumsum(dtype=np.int32), int(lens.max())
        nothing, ones = np.zeros(num_tokens, np.int32), np.ones(len(lens), np.int32)
        tables = np.zeros((len(lens), -(-most // config.block_size)), np.int32)
        is_pooling, rows = config.spec.pooler is not None, np.arange(len(lens), dtype=np.int32)
        self.step(
            StepInput(
                forward=ForwardBatch(
                    input_ids=nothing,
                    positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
                    query_start_loc=np.concatenate([nothing[:1], ends]),
                    seq_lens=lens,
                    block_tables=[tables[:, :1] if group.kind == "state" else tables for group in config.groups],
                    slot_mappings=[nothing - 1] * len(config.groups),
                    logits_indices=ends - 1,
                    token_types=nothing,
                    rope_rows=nothing,
                    rope_positions=np.zeros((num_tokens, 3), np.int32),
                    encoder_lens=ones,
                    adapters=nothing if config.spec.adapters is not None else None,
                    max_query_len=most,
                    max_seq_len=most,
                    max_encoder_len=1,
                ),
                sampling=None if is_pooling else SamplingBatch(rows=rows, slots=rows, positions=lens, seeds=rows),
                pooling=PoolingBatch(starts=ends - lens, ends=ends) if is_pooling else None,
            )
        ).result()

    def step(self, batch: StepInput) -> Pending:
        """Run one step: one copy to the device, the model, the sampler, one copy back."""
        assert self._kv is not None, "kv_init comes before step"
        self.device.activate()
        start_s = time.perf_counter()
        with memory_errors("a step's activations"), torch.inference_mode():
            arrays, prompts = self.run(batch)
            sampled = arrays.sampled
            results: list[Array] = []
            if sampled is not None:
                results = [sampled.token_ids, *(sampled.logprobs or ())]
            results += prompts
            if arrays.pooled is not None:
                results.append(arrays.pooled)

            def finish(words: IntArray) -> StepOutput:
                rest = cut(words, results)
                pooled = rest.pop() if arrays.pooled is not None else None
                return _output(rest, sampled, bool(prompts), pooled, time.perf_counter() - start_s)

            if not results:
                return Done(finish(np.empty(0, np.int32)))
            return self.receive(results[0] if len(results) == 1 else join(results), finish)

    # ---- what a platform's runner may do in its own way ---------------------------------------------------
    def run(self, batch: StepInput) -> tuple[StepArrays, list[Array]]:
        """Compute a step on the device: what it leaves there, and the arrays of its prompt log probabilities."""
        moved = self.move(batch)
        assert self._kv is not None
        arrays = run_step(
            self.ops,
            self.config.spec,
            self._params,
            self._kv,
            self._last_tokens,
            moved.forward,
            moved.sampling,
            moved.pooling,
            moved.encoder,
        )
        self._kv, self._last_tokens = arrays.kv, arrays.last_tokens
        return arrays, self._prompt_logprobs(moved.prompt_logprobs, arrays.hidden_states)

    def move(self, batch: StepInput) -> StepInput:
        """The step's arrays on the device, tokens of steps in flight filled in."""
        packed = pack(batch)
        moved = packed.unpack(self.send(packed.words))
        forward, sampling = moved.forward, moved.sampling
        if sampling is not None and isinstance(sampling.allow_mask, LateArray):
            mask = dataclasses.replace(sampling.allow_mask, send=self.send)
            moved = dataclasses.replace(moved, sampling=dataclasses.replace(sampling, allow_mask=mask))
        if forward.token_slots is None:
            return moved
        recalled = self.ops.recall_tokens(forward.input_ids, self._last_tokens, forward.token_slots)
        return dataclasses.replace(moved, forward=dataclasses.replace(forward, input_ids=recalled))

    def send(self, words: IntArray) -> Array:
        """A step's input on the device, int32 [size]; `words` may be reused when this returns."""
        return self.ops.to_device(words)

    def receive(self, words: Array, finish: Callable[[IntArray], StepOutput]) -> Pending:
        """Bring a step's results to the host; `finish` reads them from a flat int32 array."""
        return Done(finish(self.ops.to_host(words).view(np.int32)))

    def memory(self) -> Memory:
        """The device's memory now."""
        return self.device.memory()

    def close(self) -> None:
        """Drop parameters and caches."""
        self._params.clear()
        self._kv = self._last_tokens = None

    def _prompt_logprobs(self, batch: PromptLogprobsBatch | None, hidden_states: Array) -> list[Array]:
        """(chosen, ranks, top ids, top values) on the device, computed a few rows at a time."""
        if batch is None:
            return []
        pieces = [
            prompt_logprobs(
                self.ops, self.config.spec, self._params, hidden_states, rows, targets, batch.num_logprobs
            )
            for rows, targets in prompt_pieces(batch)
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def _output(
    arrays: Sequence[npt.NDArray[Any]],
    sampled: Sampled | None,
    has_prompts: bool,
    pooled: npt.NDArray[np.float32] | None,
    step_s: float,
) -> StepOutput:
    """Sort a step's results on the host: token ids, then four arrays for each kind of log probabilities."""
    rest = list(arrays)
    return StepOutput(
        token_ids=rest.pop(0) if sampled is not None else np.empty(0, np.int32),
        logprobs=_take_logprobs(rest) if sampled is not None and sampled.logprobs is not None else None,
        prompt_logprobs=_take_logprobs(rest) if has_prompts else None,
        pooled=pooled,
        timings={"step_s": step_s},
    )


def _take_logprobs(rest: list[npt.NDArray[Any]]) -> LogprobArrays:
    chosen, ranks, top_ids, top_values = (rest.pop(0) for _ in range(4))
    return LogprobArrays(chosen=chosen, ranks=ranks, top_ids=top_ids, top_values=top_values)


def _bind_device(table: OpTable, device: str) -> OpTable:
    table.to_device = functools.partial(table.to_device, device=device)
    return table


def _with_collectives(table: OpTable, device: TorchDevice) -> OpTable:
    return table if device.group is None else rank_ops(table, device.group)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn torch's ways to say "out of memory" into OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the device has no memory left for {what}: {error}") from error
    except MemoryError as error:
        raise OutOfMemory(f"this machine has no memory left for {what}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error).lower():
            raise OutOfMemory(f"the device has no memory left for {what}: {error}") from error
        raise
