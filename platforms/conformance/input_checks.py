"""What a step may bring beside tokens: another input, images, several positions and types of tokens, masks that come
late, code on the host; and the largest step, with the longest request, that a runner was made for."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headrace.core.kv.groups import cross_group
from headrace.core.models.spec import ModelSpec
from headrace.core.platform import Runner
from headrace.core.runner.encoder import encoder_batch
from headrace.core.runner.images import ImagePlaces, image_batch
from headrace.core.sampling.params import SamplingParams
from headrace.core.self_test import Driver, nmse, tiny_spec
from headrace.core.stages import (
    EncoderInput,
    ForwardBatch,
    ImageInput,
    IntArray,
    KeptImage,
    LateArray,
    NewRequest,
    PoolingBatch,
    StepInput,
    StepOutput,
)

from .drivers import TOLERANCE, compare_logprobs, driver_of, prompt_of, reference_of
from .input_specs import MOST, NUM_FEATURES, with_axes, with_cross_attention, with_images, with_pooler, with_variants
from .registry import Failed, NotSupported, Subject, add_check, check
from .values import random_weights

LENGTHS = (9, 30, 4)
Change = Callable[[StepInput, Sequence[int]], StepInput]
"""A step, and the requests that it has, as the device gets it instead."""


def _same_steps(
    subject: Subject, spec: ModelSpec, run: Callable[[Driver], list[StepOutput]], **fields: Any
) -> list[StepOutput]:
    """What `run` gives on the device and on the reference: the same tokens and log probabilities."""
    got, want = (
        run(driver) for driver in (driver_of(subject, spec, **fields), reference_of(subject, spec, **fields))
    )
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours.token_ids.tolist() != theirs.token_ids.tolist():
            raise Failed(f"step {step}: {ours.token_ids.tolist()}, expected {theirs.token_ids.tolist()}")
        if theirs.logprobs is not None:
            compare_logprobs(ours.logprobs, theirs.logprobs, f"step {step}")
    return got


def _step(driver: Driver, counts: Mapping[int, int], change: Change, num_logprobs: int = 4) -> StepOutput:
    """A step as `Driver.step` makes it, changed."""
    batch = change(driver.prepare(counts, num_logprobs=num_logprobs), list(counts))
    output = driver.runner.step(batch).result()
    waiting = [driver.requests[row] for row in counts if -1 in driver.requests[row].token_ids]
    for request, token_id in zip(waiting, output.token_ids.tolist(), strict=True):
        request.token_ids[-1] = token_id
    return output


def _changed_steps(change: Change, driver: Driver) -> list[StepOutput]:
    """Three prompts, the second one in two chunks, and three steps of one token each."""
    rows = [driver.add(prompt_of(length)) for length in LENGTHS]
    outputs = [_step(driver, dict(zip(rows, (9, 13, 4), strict=True)), change)]
    outputs.append(_step(driver, dict(zip(rows, (1, 17, 1), strict=True)), change))
    return outputs + [_step(driver, dict.fromkeys(rows, 1), change) for _ in range(3)]


def _owners(batch: StepInput, rows: Sequence[int]) -> IntArray:
    """The request of each token."""
    return np.repeat(np.asarray(rows, np.int32), np.diff(batch.forward.query_start_loc))


# ---- positions --------------------------------------------------------------------------------------------
@check("model.rope_axes")
def check_rope_axes(subject: Subject) -> str:
    """Tokens with three positions each, as those of images have, have the reference's log probabilities."""

    def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
        at = batch.forward.positions
        places = np.stack([at // 3, at % 7 + 5 * (_owners(batch, rows) == 1), 2 * at], 1).astype(np.int32)
        return replace(batch, forward=replace(batch.forward, rope_positions=places))

    outputs = _same_steps(subject, with_axes(), partial(_changed_steps, change))
    return f"{len(outputs)} steps of {len(LENGTHS)} requests"


@check("model.rope_variants")
def check_rope_variants(subject: Subject) -> str:
    """Requests of which some take the rope's table for long ones, in the same step as others."""
    subject.need(feature="rope_variants")

    def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
        return replace(batch, forward=replace(batch.forward, rope_rows=_owners(batch, rows) % 2))

    outputs = _same_steps(subject, with_variants(), partial(_changed_steps, change))
    return f"{len(outputs)} steps of {len(LENGTHS)} requests"


# ---- another input ----------------------------------------------------------------------------------------
def _check_cross(reads_frames: bool, subject: Subject) -> str:
    subject.need(feature="cross_attention")
    rng = np.random.default_rng(0)
    counts = (5, MOST, 33)
    inputs = [
        EncoderInput(features=rng.standard_normal((2 * count, NUM_FEATURES), np.float32))
        if reads_frames
        else EncoderInput(token_ids=prompt_of(count, seed=5))
        for count in counts
    ]
    outputs = _same_steps(subject, with_cross_attention(reads_frames), partial(_crossed_steps, inputs, counts))
    return f"{len(outputs)} steps of {len(counts)} requests"


def _crossed_steps(inputs: Sequence[EncoderInput], lens: Sequence[int], driver: Driver) -> list[StepOutput]:
    """Two requests whose inputs are read in one step, and one that joins them."""
    config = driver.config
    size, group, spec = config.block_size, cross_group(config.groups), config.spec.encoder
    assert spec is not None, "the model has an encoder"
    width = -(-MOST // size)
    tables = 1 + np.random.default_rng(1).permutation(3 * width).astype(np.int32).reshape(3, width)
    known: set[int] = set()

    def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
        new = [row for row in rows if row not in known]
        known.update(new)
        own = np.array([lens[row] for row in rows], np.int32)
        forward, most = batch.forward, int(own.max())
        block_tables, slots = list(forward.block_tables), list(forward.slot_mappings)
        block_tables[group], slots[group] = tables[list(rows), : -(-most // size)], np.empty(0, np.int32)
        forward = replace(
            forward, block_tables=block_tables, slot_mappings=slots, encoder_lens=own, max_encoder_len=most
        )
        if not new:
            return replace(batch, forward=forward)
        read = [inputs[row] for row in new]
        encoder = encoder_batch(spec, read, tables[new], block_size=size, dtype=config.dtype)
        return replace(batch, forward=forward, encoder=encoder)

    rows = [driver.add(prompt_of(length)) for length in LENGTHS]
    outputs = [_step(driver, {rows[0]: 9, rows[1]: 30}, change)]
    outputs.append(_step(driver, {rows[1]: 1, rows[2]: 4, rows[0]: 1}, change))
    return outputs + [_step(driver, dict.fromkeys(rows, 1), change) for _ in range(3)]


# ---- images -----------------------------------------------------------------------------------------------
def _check_images(kind: str, subject: Subject) -> str:
    spec = with_images(kind)
    for feature in ("images", "sliding_window")[: 2 if kind == "sight" else 1]:
        subject.need(feature=feature)
    outputs = _same_steps(subject, spec, _steps_with_images, num_image_rows=8 * subject.block_size)
    return f"{len(outputs)} steps, 2 images in 3 places"


def _steps_with_images(driver: Driver) -> list[StepOutput]:
    """Two images that are read in one step, a request with one, a text, and a request with both in a later step."""
    config, rng = driver.config, np.random.default_rng(0)
    spec, size, vision = config.spec, config.block_size, config.spec.vision
    assert vision is not None, "the model reads images"
    grids, blocks = ((4, 4), (4, 6)), ((5,), (2,))
    patches = [rng.standard_normal((height * width, NUM_FEATURES), np.float32) for height, width in grids]
    places = ImagePlaces(spec, max_num_seqs=config.max_num_seqs, length=config.max_model_len + 1, block_size=size)

    def kept(image: int, first: int) -> KeptImage:
        where = first + np.arange(len(patches[image]) // vision.merge**2, dtype=np.int32)
        return KeptImage(
            image=ImageInput(patches=patches[image], grid=grids[image], places=where),
            blocks=blocks[image],
            must_encode=True,
        )

    shown: tuple[list[KeptImage], ...] = ([kept(0, 3)], [], [kept(1, 2), kept(0, 9)])
    for slot, images in enumerate(shown):
        tokens = prompt_of(17 - 6 * (not images))
        driver.add(tokens)
        places.admit(
            NewRequest(
                request_id=str(slot),
                epoch=0,
                slot=slot,
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                num_computed_tokens=0,
                sampling_params=SamplingParams(),
                seed=0,
                images=images,
            )
        )

    def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
        forward = batch.forward
        fields = places.batch(
            _owners(batch, rows).astype(np.int64), forward.positions.astype(np.int64), forward.input_ids
        )
        return replace(batch, forward=replace(forward, **fields))

    def with_both(batch: StepInput, rows: Sequence[int]) -> StepInput:
        encoder = image_batch(vision, [shown[0][0], shown[2][0]], block_size=size, dtype=config.dtype)
        return replace(change(batch, rows), encoder=encoder)

    first = 3 if vision.sight == "image" else 5  # whose rows must be in one step, or may be in two
    outputs = [_step(driver, {0: first, 1: 11}, with_both)]
    outputs.append(_step(driver, {1: 1, 0: 17 - first}, change))
    outputs.append(_step(driver, {2: 17, 0: 1, 1: 1}, change))
    return outputs + [_step(driver, dict.fromkeys(range(3), 1), change) for _ in range(2)]


# ---- vectors ----------------------------------------------------------------------------------------------
@check("model.encoder")
def check_encoder(subject: Subject) -> str:
    """Vectors of an encoder with token types: means, first tokens through a head, last ones, of several requests."""
    worst = 0.0
    for kind in ("mean", "cls", "last"):
        spec = with_pooler(kind)
        found = []
        for make in (subject.runner, subject.reference_runner):
            runner, _ = make(spec, params=random_weights)
            runner.kv_init([])
            runner.warmup()
            found.append([_vectors(runner, kind, lengths) for lengths in ((23, 1, MOST), (7,), (2, 40))])
        for got, want in zip(*found, strict=True):
            if got is None or want is None or got.shape != want.shape:
                raise Failed(f"{kind}: vectors {None if got is None else got.shape}, expected another shape")
            worst = max(worst, nmse(got, want))
    if not worst <= TOLERANCE:
        raise Failed(f"error {worst:.1e}, allowed {TOLERANCE:.0e}")
    return f"9 steps, error {worst:.1e}"


def _vectors(runner: Runner, kind: str, lengths: Sequence[int]) -> Any:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    forward = ForwardBatch(
        input_ids=np.array([token for length in lengths for token in prompt_of(length)], np.int32),
        positions=positions,
        query_start_loc=starts,
        seq_lens=np.array(lengths, np.int32),
        block_tables=[],
        slot_mappings=[],
        logits_indices=np.empty(0, np.int32),
        token_types=(positions > 4).astype(np.int32),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    begin, end = starts[:-1], starts[1:]
    pooling = PoolingBatch(
        starts=end - np.int32(1) if kind == "last" else begin, ends=begin + np.int32(1) if kind == "cls" else end
    )
    return runner.step(StepInput(forward=forward, pooling=pooling)).result().pooled


# ---- sampling ---------------------------------------------------------------------------------------------
@check("model.late_masks")
def check_late_masks(subject: Subject) -> str:
    """Masks that another thread fills while the step runs restrict it as those that were there."""
    if not subject.runner(tiny_spec())[0].takes_late_masks:
        raise NotSupported("its steps wait for masks")

    def run(late: bool, driver: Driver) -> list[StepOutput]:
        rng = np.random.default_rng(0)

        def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
            assert batch.sampling is not None, "every request samples"
            words = rng.integers(-(2**31), 2**31, (len(rows), 7)).astype(np.int32)
            mask: Any = words
            if late:
                filled: Future[IntArray] = Future()
                mask = LateArray(filled=filled)
                threading.Timer(0.02, filled.set_result, [words]).start()
            return replace(batch, sampling=replace(batch.sampling, allow_mask=mask))

        rows = [driver.add(prompt_of(length)) for length in LENGTHS]
        outputs = [_step(driver, dict(zip(rows, LENGTHS, strict=True)), change)]
        return outputs + [_step(driver, dict.fromkeys(rows, 1), change) for _ in range(3)]

    got, want = run(True, driver_of(subject, tiny_spec())), run(False, reference_of(subject, tiny_spec()))
    tokens = [[output.token_ids.tolist() for output in outputs] for outputs in (got, want)]
    if tokens[0] != tokens[1]:
        raise Failed(f"{tokens[0]}, expected {tokens[1]}")
    return f"{len(got)} steps of {len(LENGTHS)} requests"


@check("model.processors")
def check_processors(subject: Subject) -> str:
    """Logits processors get their rows' logits behind penalties and biases, and decide what is sampled."""

    def change(batch: StepInput, rows: Sequence[int]) -> StepInput:
        assert batch.sampling is not None, "every request samples"
        count = len(rows)
        sampling = replace(
            batch.sampling,
            temperature=np.array([0.0, 0.9, 0.0], np.float32)[:count],
            bias_rows=np.array([count - 1], np.int32),
            bias_tokens=np.array([100], np.int32),
            bias_values=np.array([4.0], np.float32),
            processors=[(count - 1, np.negative), (0, lambda logits: np.roll(logits, 3))],
        )
        return replace(batch, sampling=sampling)

    def run(driver: Driver) -> list[StepOutput]:
        rows = [driver.add(prompt_of(length), seed=length) for length in LENGTHS]
        outputs = [_step(driver, dict(zip(rows, LENGTHS, strict=True)), change)]
        return outputs + [_step(driver, dict.fromkeys(rows[:count], 1), change) for count in (3, 1, 2)]

    outputs = _same_steps(subject, tiny_spec(), run)
    return f"{len(outputs)} steps"


# ---- limits -----------------------------------------------------------------------------------------------
@check("model.limits")
def check_limits(subject: Subject) -> str:
    """The most requests, the most tokens of a step, and a request up to the last position, against the reference."""
    has_window = "sliding_window" in subject.device.caps.features
    spec = tiny_spec(window=24 if has_window else 0)

    def run(driver: Driver) -> list[StepOutput]:
        config = driver.config
        short = config.max_num_seqs - 1
        left = config.max_num_batched_tokens - 9 * short
        *rows, longest = (
            driver.add(prompt_of(9, seed=row), temperature=row % 2, seed=row) for row in range(short + 1)
        )
        driver.requests[longest].token_ids = prompt_of(config.max_model_len - 3)
        outputs = [driver.step({longest: left, **dict.fromkeys(rows, 9)}, num_logprobs=0)]
        rest = config.max_model_len - 3 - left
        outputs.append(driver.step({**dict.fromkeys(rows, 1), longest: rest}, num_logprobs=20))
        return outputs + [driver.step(dict.fromkeys((*rows, longest), 1), num_logprobs=1) for _ in range(2)]

    num_blocks = 64 + -(-spec.max_position_embeddings // subject.block_size)
    _same_steps(subject, spec, run, num_blocks=num_blocks)
    return f"{spec.max_position_embeddings} positions, 8 requests, 512 tokens"


def _register() -> None:
    for name, reads_frames in (("tokens", False), ("frames", True)):
        meaning = f"cross attention to an encoder of {name}, whose inputs are read in the steps that need them"
        add_check(f"model.cross.{name}", meaning, partial(_check_cross, reads_frames))
    for kind, what in (
        ("rows", "a learned row before patches"),
        ("axes", "windows, ropes by row and column, rows added behind a layer"),
        ("sight", "rows that are means of patches and see each other"),
    ):
        meaning = f"rows of images in prompts, kept for later steps; {what}"
        add_check(f"model.images.{kind}", meaning, partial(_check_images, kind))


_register()
