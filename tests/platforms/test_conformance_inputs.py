"""Bugs in what steps read beside tokens, in tables of several groups, at a runner's limits, in stored weights."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.models import encoder_decoder
from headrace.core.ops import OpTable
from headrace.core.ops.attention import Integers
from headrace.core.platform import Pending
from headrace.core.plugin_loader import Plugins
from headrace.core.runner import step as steps
from headrace.core.runner.buckets import Buckets
from headrace.core.runner.torch import TorchRunner
from headrace.core.stages import StepInput, StepOutput
from headrace.core.weights.source import HostTensor
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from wrong_device import Op, WrongDevice, must_fail, open_on

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- ops --------------------------------------------------------------------------------------------------
def _rounded_before_the_weight(x: Any, weight: Any, *, eps: float) -> Any:
    y = OpTable.rms_norm(x, None, eps=eps)
    return y if weight is None else (y * weight).to(x.dtype)


def _rounded_before_weight_and_bias(x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    y = OpTable.layer_norm(x, None, None, eps=eps)
    y = y if weight is None else (y * weight).to(x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


def _factor_of_variants_alone(positions: Any, inv_freq: Any, factor: Any, rows: Any = None, **kwargs: Any) -> Any:
    factor = torch.ones_like(factor) if rows is None else factor
    return OpTable.rotary_angles(positions, inv_freq, factor, rows, **kwargs)


def _heads_of_64(*args: Any, **kwargs: Any) -> Any:
    out = OpTable.encoder_attention(*args, **kwargs)
    out[..., 64:] = 0
    return out


def _softcap_or_bias(q: Any, k: Any, v: Any, starts: Any, bias: Any = None, **kwargs: Any) -> Any:
    kwargs["softcap"] = 0.0 if bias is not None else kwargs.get("softcap", 0.0)
    return OpTable.encoder_attention(q, k, v, starts, bias, **kwargs)


def _weight_of_a_single_expert_is_1(logits: Any, correction: Any = None, **kwargs: Any) -> Any:
    weights, experts = OpTable.route_experts(logits, correction, **kwargs)
    return torch.ones_like(weights) if weights.shape[1] == 1 else weights, experts


def _bias_in_prompts_alone(*args: Any, relative_bias: Any = None, max_query_len: int = 0, **kwargs: Any) -> Any:
    relative_bias = None if max_query_len == 1 else relative_bias
    return OpTable.paged_attention(*args, relative_bias=relative_bias, max_query_len=max_query_len, **kwargs)


def _64_decodes(query: Any, *args: Any, max_query_len: int = 0, **kwargs: Any) -> Any:
    out = OpTable.paged_attention(query, *args, max_query_len=max_query_len, **kwargs)
    if max_query_len == 1:
        out[64:] = 0
    return out


def _no_sight_ahead_in_int8(query: Any, cache: Any, *args: Any, reach: Any = None, **kwargs: Any) -> Any:
    reach = None if isinstance(cache[0], Integers) else reach
    return OpTable.paged_attention(query, cache, *args, reach=reach, **kwargs)


def _ends_at_padding(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    count = int((slots < 0).long().argmax()) if (slots < 0).any() else len(slots)
    return OpTable.write_kv(cache, key[:count], value[:count], slots[:count])


def _packed(op: str, change: Callable[[HostTensor], HostTensor]) -> Op:
    right = getattr(OpTable, op)

    def wrong(tensors: Sequence[HostTensor], **kwargs: Any) -> Any:
        return right([change(tensor) for tensor in tensors], **kwargs)

    wrong.__name__ = f"{op}_{change.__name__.strip('_')}"
    return wrong


def _one_code_too_much(tensor: HostTensor) -> HostTensor:
    if tensor.offsets is None or tensor.scales is None:
        return tensor
    return dataclasses.replace(tensor, offsets=tensor.offsets + tensor.scales)


def _scales_of_the_row_before(tensor: HostTensor) -> HostTensor:
    return tensor if tensor.scales is None else dataclasses.replace(tensor, scales=np.roll(tensor.scales, 1, 0))


def _last_group_as_the_one_before(tensor: HostTensor) -> HostTensor:
    if tensor.scales is None or tensor.group != 128:
        return tensor
    scales = tensor.scales.copy()
    scales[:, -1] = scales[:, -2]
    return dataclasses.replace(tensor, scales=scales)


def _kinds_of_the_first_part(tensors: Sequence[HostTensor], **kwargs: Any) -> Any:
    weight = OpTable.pack_linear(tensors, **kwargs)
    if len({tensor.dtype for tensor in tensors}) > 1:
        weight[-tensors[-1].shape[0] :] *= 0.9
    return weight


WRONG: list[tuple[str, Op, str, str]] = [
    ("rms_norm", _rounded_before_the_weight, "ops.rms_norm.bfloat16", "rounded before"),
    ("rms_norm", _rounded_before_the_weight, "ops.rms_norm.float16", "rounded before"),
    ("layer_norm", _rounded_before_weight_and_bias, "ops.layer_norm.bfloat16", "rounded before"),
    ("rotary_angles", _factor_of_variants_alone, "ops.rotary_angles", "a factor"),
    ("encoder_attention", _heads_of_64, "ops.encoder_attention.bfloat16", "heads of 72"),
    ("encoder_attention", _softcap_or_bias, "ops.encoder_attention.float32", "a bias, a window"),
    ("route_experts", _weight_of_a_single_expert_is_1, "ops.route_experts", "one of them"),
    ("paged_attention", _bias_in_prompts_alone, "attention.relative_decode.float32", "error"),
    ("paged_attention", _64_decodes, "attention.many_requests_decode.float32", "error"),
    ("paged_attention", _no_sight_ahead_in_int8, "attention.int8_cache_reach.float32", "error"),
    ("write_kv", _ends_at_padding, "attention.plain.float32", "error"),
    ("pack_linear", _packed("pack_linear", _last_group_as_the_one_before), "ops.linear.float32", "int4-g128"),
    ("pack_linear", _kinds_of_the_first_part, "ops.linear.float32", "mixed"),
    ("pack_linear", _packed("pack_linear", _one_code_too_much), "ops.embedding.float32", "int"),
    ("pack_stacked", _packed("pack_stacked", _one_code_too_much), "ops.stored_experts.float32", "experts in int4"),
    ("pack_stacked", _packed("pack_stacked", _scales_of_the_row_before), "ops.stored_experts.bfloat16", "in int8"),
    ("pack_stacked", _packed("pack_stacked", _last_group_as_the_one_before), "ops.stored_experts.float32", "g128"),
]
"""(op, what is wrong with it, the check that must find it, words of the finding)."""


@pytest.mark.parametrize(
    ("op", "wrong", "name", "words"), WRONG, ids=[f"{w.__name__}-{name}" for _, w, name, _ in WRONG]
)
def test_a_wrong_op_is_caught(plugins: Plugins, op: str, wrong: Op, name: str, words: str) -> None:
    must_fail(name, WrongDevice(open_on(plugins, "reference"), op, wrong), plugins, words)


# ---- steps ------------------------------------------------------------------------------------------------
def _forward(change: Callable[[Any], dict[str, Any]]) -> Callable[[StepInput], StepInput]:
    return lambda batch: dataclasses.replace(
        batch, forward=dataclasses.replace(batch.forward, **change(batch.forward))
    )


def _sampling(change: Callable[[Any], dict[str, Any]]) -> Callable[[StepInput], StepInput]:
    def changed(batch: StepInput) -> StepInput:
        if batch.sampling is None:
            return batch
        return dataclasses.replace(batch, sampling=dataclasses.replace(batch.sampling, **change(batch.sampling)))

    return changed


def _of(name: str, change: Callable[[Any], Any]) -> Callable[[StepInput], StepInput]:
    """One array of the forward batch, where it is there."""
    return _forward(lambda f: {name: change(getattr(f, name))} if getattr(f, name) is not None else {})


def _one_table(forward: Any) -> dict[str, Any]:
    return {"block_tables": forward.block_tables[:1] * len(forward.block_tables)}


def _last_column_again(forward: Any) -> dict[str, Any]:
    tables = [table.copy() for table in forward.block_tables]
    for table in tables:
        if table.shape[1] >= 32:
            table[:, 31] = table[:, 30]
    return {"block_tables": tables}


def _drops_token_512(forward: Any) -> dict[str, Any]:
    slots = [array.copy() for array in forward.slot_mappings]
    for array in slots:
        array[511:] = -1
    return {"slot_mappings": slots}


def _pooling(batch: StepInput) -> StepInput:
    """Means without their first token."""
    asked = batch.pooling
    if asked is None:
        return batch
    starts = np.minimum(asked.starts + 1, asked.ends - 1)
    return dataclasses.replace(batch, pooling=dataclasses.replace(asked, starts=starts))


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (_forward(_one_table), "model.greedy.window", ""),
        (_of("token_types", np.zeros_like), "model.encoder", "error"),
        (_pooling, "model.encoder", "error"),
        (_of("rope_rows", np.zeros_like), "model.rope_variants", "step"),
        (_of("rope_positions", lambda x: np.repeat(x[:, :1], 3, 1)), "model.rope_axes", "step"),
        (_of("rope_positions", lambda x: np.repeat(x[:, :1], 3, 1)), "model.images.axes", "step"),
        (_of("reach", np.zeros_like), "model.images.sight", "step"),
        (_of("image_rows", lambda x: np.where(x < 0, x, x + 1)), "model.images.rows", "step"),
        (_of("encoder_lens", lambda x: np.maximum(x - 1, 1)), "model.cross.tokens", "step"),
        (_sampling(lambda s: {"processors": ()}), "model.processors", "expected"),
        (_sampling(lambda s: {"processors": [(0, f) for _, f in s.processors]}), "model.processors", "expected"),
        (_sampling(lambda s: {"allow_mask": None}), "model.late_masks", "expected"),
        (_forward(_last_column_again), "model.limits", "step"),
        (_forward(_drops_token_512), "model.limits", "step"),
        (_sampling(lambda s: {"num_logprobs": s.num_logprobs or -1}), "model.limits", "no log probabilities"),
    ],
    ids=[
        "one_table", "types", "means", "variants", "axes", "axes_of_images", "sight", "image_rows", "encoder_lens",
        "no_processors", "processors_of_row_0", "no_late_mask", "table", "token_512", "no_logprobs",
    ],
)  # fmt: skip
def test_a_wrong_step_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, change: Any, name: str, words: str
) -> None:
    device, right = open_on(plugins, "reference"), TorchRunner.step

    def step(runner: TorchRunner, batch: StepInput) -> Pending:
        return right(runner, change(batch) if runner.device is device else batch)

    monkeypatch.setattr(TorchRunner, "step", step)
    must_fail(name, device, plugins, words)


class Changed:
    """A step whose output is changed."""

    def __init__(self, pending: Pending, change: Callable[[StepOutput], StepOutput]) -> None:
        self.pending, self.change = pending, change

    def ready(self) -> bool:
        """As the step."""
        return self.pending.ready()

    def result(self) -> StepOutput:
        """Of the step, changed."""
        return self.change(self.pending.result())


def test_an_eighth_request_that_gets_nothing_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    device, right = open_on(plugins, "reference"), TorchRunner.step

    def change(output: StepOutput) -> StepOutput:
        return dataclasses.replace(
            output, token_ids=np.where(np.arange(len(output.token_ids)) < 7, output.token_ids, 0)
        )

    def step(runner: TorchRunner, batch: StepInput) -> Pending:
        return Changed(right(runner, batch), change) if runner.device is device else right(runner, batch)

    monkeypatch.setattr(TorchRunner, "step", step)
    must_fail("model.limits", device, plugins, "expected")


def test_padding_that_is_a_penalty_of_row_0_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Buckets._sample_layout

    def wrong(buckets: Buckets, bucket: Any) -> Any:
        layout = dict(right(buckets, bucket))
        if "penalty_rows" in layout:
            layout["penalty_rows"] = (*layout["penalty_rows"][:2], 0)
        return layout

    monkeypatch.setattr(Buckets, "_sample_layout", wrong)
    must_fail("model.drafts_sampled", open_on(plugins, "gaudi:emulated"), plugins, "expected")


# ---- what runs in a step ----------------------------------------------------------------------------------
def _without_the_last_layer(right: Op) -> Op:
    """Keys and values of the other input are kept for all layers but one."""

    def wrong(ops: Any, spec: Any, *args: Any) -> Any:
        last = dataclasses.replace(spec.layers[-1], cross=None)
        return right(ops, dataclasses.replace(spec, layers=(*spec.layers[:-1], last)), *args)

    return wrong


def _without_the_last_row(right: Op) -> Op:
    def wrong(ops: Any, spec: Any, params: Any, kv: Any, batch: Any) -> Any:
        slots = batch.slot_mapping.clone()
        slots[-1] = -1
        return right(ops, spec, params, kv, dataclasses.replace(batch, slot_mapping=slots))

    return wrong


def _without_windows(right: Op) -> Op:
    def wrong(ops: Any, spec: Any, params: Any, kv: Any, batch: Any) -> Any:
        return right(ops, spec, params, kv, dataclasses.replace(batch, window_start_loc=batch.query_start_loc))

    return wrong


def _several_inputs_alone(right: Op) -> Op:
    def wrong(ops: Any, spec: Any, params: Any, kv: Any, batch: Any) -> Any:
        return kv if len(batch.query_start_loc) == 2 else right(ops, spec, params, kv, batch)

    return wrong


def _without_activations(right: Op) -> Op:
    def wrong(ops: Any, spec: Any, *args: Any) -> Any:
        dense = tuple(dataclasses.replace(layer, activation=None) for layer in spec.pooler.dense)
        return right(ops, dataclasses.replace(spec, pooler=dataclasses.replace(spec.pooler, dense=dense)), *args)

    return wrong


@pytest.mark.parametrize(
    ("module", "function", "make", "name", "words"),
    [
        (encoder_decoder, "write_cross", _without_the_last_layer, "model.cross.tokens", "step"),
        (steps, "encode", _several_inputs_alone, "model.cross.frames", "step 1"),
        (steps, "encode_images", _without_the_last_row, "model.images.rows", "step"),
        (steps, "encode_images", _without_windows, "model.images.axes", "step"),
        (steps, "pool", _without_activations, "model.encoder", "error"),
    ],
)
def test_a_wrong_part_of_a_step_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, make: Any, name: str, words: str
) -> None:
    device, right, run = open_on(plugins, "reference"), getattr(module, function), TorchRunner.run

    def run_wrongly(runner: TorchRunner, batch: StepInput) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if runner.device is device:
                inner.setattr(module, function, make(right))
            return run(runner, batch)

    monkeypatch.setattr(TorchRunner, "run", run_wrongly)
    must_fail(name, device, plugins, words)


# ---- memory -----------------------------------------------------------------------------------------------
def test_memory_that_is_kept_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    run, device = TorchRunner.run, open_on(plugins, "reference")

    def keeps_hidden_states(runner: TorchRunner, batch: StepInput) -> Any:
        arrays, prompts = run(runner, batch)
        kept.append(arrays.hidden_states)
        return arrays, prompts

    monkeypatch.setattr(TorchRunner, "run", keeps_hidden_states)
    must_fail("memory.leak", device, plugins, "more objects")


# ---- blocks on the host -----------------------------------------------------------------------------------
def _read_blocks(runner: TorchRunner, group: int, block_ids: Sequence[int]) -> Any:
    assert runner._kv is not None
    layers = [runner._kv.layers[index] for index in runner.config.groups[group].layer_indices]
    return torch.stack([torch.stack([part[list(block_ids)] for part in layer], 1) for layer in layers], 1).numpy()


def _write_blocks(left_out: int) -> Op:
    @torch.inference_mode()
    def write(runner: TorchRunner, group: int, block_ids: Sequence[int], data: Any) -> None:
        assert runner._kv is not None
        indices = runner.config.groups[group].layer_indices
        for n, index in enumerate(indices[: len(indices) - left_out]):
            for part, values in zip(runner._kv.layers[index], torch.from_numpy(data[:, n]).unbind(1), strict=True):
                part[list(block_ids)] = values

    return write


def test_a_copy_of_blocks_that_is_one_layer_short_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_on(plugins, "reference")
    spec = all_checks()["model.kv_blocks"]
    assert run_check(spec, Subject(device, plugins)).outcome == "unsupported"
    monkeypatch.setattr(TorchRunner, "read_blocks", _read_blocks)
    for left_out, outcome in ((0, "passed"), (1, "failed")):
        monkeypatch.setattr(TorchRunner, "write_blocks", _write_blocks(left_out))
        result = run_check(spec, Subject(device, plugins))
        assert result.outcome == outcome, result
