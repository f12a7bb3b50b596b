"""A whole runner: a tiny model's tokens, however a request is cut into steps, and what memory does meanwhile."""

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from headrace.core.errors import OutOfMemory
from headrace.core.models.spec import (
    NO_ATTENTION,
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from headrace.core.self_test import Driver, nmse, tiny_spec
from headrace.core.units import format_bytes

from .registry import DTYPES, Failed, NotSupported, Subject, add_check, check
from .values import random_weights

LENGTHS = (1, 16, 17, 40, 75)
NUM_TOKENS = 12
MODEL_TOLERANCE = {"float32": 1e-9, "float16": 1e-4, "bfloat16": 5e-3}
"""Normalised mean square error of log probabilities against float64: errors add up over the layers."""
SLACK_BYTES = 8 << 20
"""What an allocator may round up, and what a process may grow by for reasons of its own."""


def _with_attention(**changes: Any) -> ModelSpec:
    """The tiny model with other attention."""
    spec = tiny_spec()
    layers = (dataclasses.replace(x, attn=dataclasses.replace(x.attn, **changes)) for x in spec.layers)
    return dataclasses.replace(spec, layers=tuple(layers))


def _with_experts() -> ModelSpec:
    """The tiny model with a mixture in its second layer, and a block that every token passes."""
    spec = tiny_spec()
    first, second = spec.layers
    moe = MoeSpec(num_experts=8, num_experts_per_token=2, intermediate_size=40, shared=first.mlp)
    return dataclasses.replace(spec, layers=(first, dataclasses.replace(second, moe=moe)))


def _with_latent_attention() -> ModelSpec:
    """The tiny model with attention over latents."""
    spec = tiny_spec()
    rope = spec.layers[0].attn.rope
    latent = LatentSpec(
        q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, norm=NormSpec()
    )
    attn = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=48, scale=32**-0.5, rope=rope, latent=latent)
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(x, attn=attn) for x in spec.layers))


def _with_recurrence(**changes: Any) -> ModelSpec:
    """The tiny model with a recurrence in the place of its first layer's attention."""
    spec = tiny_spec()
    first, second = spec.layers
    mixer = MixerSpec(kind="mamba2", num_heads=4, head_dim=16, num_key_heads=2, state_size=16)
    mixer = dataclasses.replace(mixer, **changes)
    layers = (dataclasses.replace(first, attn=NO_ATTENTION, mixer=mixer), second)
    return dataclasses.replace(spec, layers=layers)


def _with_weighted_means() -> ModelSpec:
    """The tiny model with an RWKV in the place of its first layer."""
    spec = tiny_spec()
    mixer = MixerSpec(kind="wkv", num_heads=48, head_dim=1, shift_size=spec.hidden_size, mlp_size=96)
    return dataclasses.replace(spec, layers=(LayerSpec(mixer=mixer, stream_scale=0.5), spec.layers[1]))


SPECS: dict[str, tuple[Callable[[], ModelSpec], tuple[str, ...]]] = {
    "plain": (tiny_spec, ()),
    "window": (partial(tiny_spec, window=24), ("sliding_window",)),
    "softcap": (partial(tiny_spec, softcap=2.0), ("softcap",)),
    "alibi": (partial(_with_attention, alibi_max_bias=8.0, rope=None), ()),
    "sinks": (partial(_with_attention, sinks=True), ()),
    "normalised_heads": (partial(_with_attention, qk_norm=NormSpec(), qkv_bias=True, o_bias=True), ()),
    "experts": (_with_experts, ()),
    "latent": (_with_latent_attention, ()),
    "partial_rope": (partial(_with_attention, rope=RopeSpec(rotary_dim=8, interleaved=True)), ()),
    "states": (_with_recurrence, ("states",)),
    "weighted_means": (_with_weighted_means, ("states",)),
    "delta_states": (partial(_with_recurrence, kind="delta", conv_bias=False, norm=NormSpec()), ("states",)),
}
"""Models by name, and the features that each needs."""


def _prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed + length).integers(0, 211, length)]


def _same(got: object, want: object, what: str) -> None:
    if got != want:
        raise Failed(f"{what}: {got}, expected {want}")


def _check_greedy(name: str, subject: Subject) -> str:
    make, features = SPECS[name]
    for feature in features:
        subject.need(feature=feature)
    spec = make()
    driver = Driver(*subject.runner(spec, params=random_weights))
    oracle = Driver(*subject.reference_runner(spec, params=random_weights), seed=1)
    for length in LENGTHS:
        prompt = _prompt(length)
        want, got = oracle.generate(prompt, NUM_TOKENS), driver.generate(prompt, NUM_TOKENS)
        _same(got, want, f"prompt of {length}")
    return f"{len(LENGTHS)} prompts, {NUM_TOKENS} tokens each, equal to the reference"


def _check_states(name: str, subject: Subject) -> str:
    subject.need(feature="states")
    spec = SPECS[name][0]()
    driver = Driver(*subject.runner(spec, params=random_weights), num_blocks=24)
    oracle = Driver(*subject.reference_runner(spec, params=random_weights), seed=1)
    prompts = [_prompt(length) for length in (1, 17, 40)]
    want = [oracle.generate(prompt, NUM_TOKENS) for prompt in prompts]
    for chunk in (1, 3, 64):  # blocks and states come back from one request to the next, dirty
        for prompt, tokens in zip(prompts, want, strict=True):
            _same(driver.generate(prompt, NUM_TOKENS, chunk=chunk), tokens, f"prompt of {len(prompt)} by {chunk}")
            driver.remove_all()
    rows = [driver.add(prompt) for prompt in prompts]
    driver.step({row: len(driver.requests[row].token_ids) for row in rows})
    for _ in range(NUM_TOKENS - 1):
        driver.step({row: 1 for row in reversed(rows)})
    _same([driver.requests[row].token_ids[-NUM_TOKENS:] for row in rows], want, "three requests at a time")
    return f"{len(prompts)} prompts by 1, 3 and 64 tokens, and together"


def _check_logprobs(dtype: str, subject: Subject) -> str:
    spec = tiny_spec()
    driver = Driver(*subject.runner(spec, dtype=dtype))
    oracle = Driver(*subject.reference_runner(spec, dtype="float64"), seed=1)
    rows = {driver.add(_prompt(length)): length for length in LENGTHS}
    for length in LENGTHS:
        oracle.add(_prompt(length))
    got = driver.step(rows, num_logprobs=spec.vocab_size).logprobs
    want = oracle.step(rows, num_logprobs=spec.vocab_size).logprobs
    if got is None or want is None:
        raise Failed("no log probabilities came")
    for name, array in (("chosen", got.chosen), ("ranks", got.ranks)):
        _same(array.shape, (len(rows),), f"shape of {name}")
    for name, array in (("top_ids", got.top_ids), ("top_values", got.top_values)):
        _same(array.shape, (len(rows), spec.vocab_size), f"shape of {name}")
    by_token = [np.take_along_axis(a.top_values, np.argsort(a.top_ids, -1), -1) for a in (got, want)]
    error = nmse(*by_token)
    if not error <= MODEL_TOLERANCE[dtype]:
        raise Failed(f"error {error:.1e}, allowed {MODEL_TOLERANCE[dtype]:.0e}")
    return f"{len(rows)} prompts, error {error:.1e}, allowed {MODEL_TOLERANCE[dtype]:.0e}"


@check("model.chunked")
def check_chunked(subject: Subject) -> str:
    """A prompt computed in chunks gives the tokens of the whole prompt."""
    driver = Driver(*subject.runner(tiny_spec(window=24) if _has_window(subject) else tiny_spec()))
    prompt = _prompt(75)
    whole = driver.generate(prompt, NUM_TOKENS)
    for chunk in (1, 3, 16, 50):
        _same(driver.generate(prompt, NUM_TOKENS, chunk=chunk), whole, f"chunks of {chunk}")
        driver.remove_all()
    return "chunks of 1, 3, 16 and 50"


@check("model.batch")
def check_batch(subject: Subject) -> str:
    """Prompts, chunks and decodes in one step give each request what it gets alone."""
    driver = Driver(*subject.runner(tiny_spec()))
    prompts = [_prompt(length) for length in LENGTHS]
    alone = []
    for prompt in prompts:
        alone.append(driver.generate(prompt, NUM_TOKENS))
        driver.remove_all()
    # Request i joins at step i, and its prompt is computed at most 9 tokens a step.
    for step in range(200):
        if step < len(prompts):
            driver.add(prompts[step])
        left = {
            i: len(r.token_ids) - r.num_computed
            for i, r in enumerate(driver.requests)
            if len(r.token_ids) < len(prompts[i]) + NUM_TOKENS
        }
        if not left:
            break
        driver.step({i: min(count, 9) for i, count in left.items()})
    for request, prompt, want in zip(driver.requests, prompts, alone, strict=True):
        _same(request.token_ids[len(prompt) :], want, f"prompt of {len(prompt)} in a batch")
    return f"{len(prompts)} requests joining one by one"


@check("model.dirty_blocks")
def check_dirty_blocks(subject: Subject) -> str:
    """Blocks that other requests have used give the same tokens as fresh ones."""
    runner, config = subject.runner(tiny_spec(window=24) if _has_window(subject) else tiny_spec())
    driver = Driver(runner, config, num_blocks=14)
    prompt = _prompt(60)
    fresh = driver.generate(prompt, NUM_TOKENS)
    for round_ in range(6):
        driver.remove_all()
        driver.generate(_prompt(90, seed=round_), 3)
        driver.remove_all()
        _same(driver.generate(prompt, NUM_TOKENS), fresh, f"round {round_}")
    return "6 rounds over 13 blocks"


@check("model.seeds")
def check_seeds(subject: Subject) -> str:
    """A seed gives the reference's tokens, alone and in a batch; another seed gives others."""
    spec = tiny_spec()
    driver = Driver(*subject.runner(spec))
    oracle = Driver(*subject.reference_runner(spec), seed=1)
    prompt = _prompt(20)

    def sampled(tried: Driver, seeds: list[int]) -> list[list[int]]:
        tried.remove_all()
        rows = [tried.add(prompt, temperature=1.0, seed=seed) for seed in seeds]
        tried.step({row: len(prompt) for row in rows})
        for _ in range(NUM_TOKENS - 1):
            tried.step({row: 1 for row in rows})
        return [tried.requests[row].token_ids[len(prompt) :] for row in rows]

    [alone] = sampled(driver, [7])
    batch = sampled(driver, [1, 7, -5, 7])
    _same(batch[1], alone, "seed 7 in a batch")
    _same(batch[3], alone, "seed 7 twice in a batch")
    if batch[0] == alone or batch[2] == alone:
        raise Failed("other seeds gave the same tokens")
    _same(batch, sampled(oracle, [1, 7, -5, 7]), "the reference's samples")
    return f"3 seeds, {NUM_TOKENS} tokens each"


@check("model.run_ahead")
def check_run_ahead(subject: Subject) -> str:
    """A step that begins before the last one's tokens are known computes the same tokens."""
    depth = subject.device.caps.depth
    if not depth:
        raise NotSupported("depth 0: no step begins before the last one's result is read")
    driver = Driver(*subject.runner(tiny_spec()))
    prompts = [_prompt(5), _prompt(20), _prompt(11)]  # three, so that steps of a few sizes are padded
    alone = [driver.generate(prompt, NUM_TOKENS) for prompt in prompts]
    driver.remove_all()
    rows = [driver.add(prompt) for prompt in prompts]
    pending = [driver.submit({row: len(prompts[row]) for row in rows})]
    found: list[list[int]] = []
    while len(found) < NUM_TOKENS:
        while len(pending) <= depth and len(found) + len(pending) < NUM_TOKENS:
            pending.append(driver.submit({row: 1 for row in rows}))
        found.append(pending.pop(0).result().token_ids.tolist())
    _same([list(column) for column in zip(*found, strict=True)], alone, f"depth {depth}")
    return f"{NUM_TOKENS} tokens of {len(rows)} requests, {depth} steps ahead"


@check("model.masks")
def check_masks(subject: Subject) -> str:
    """A request whose tokens a mask restricts samples allowed tokens only, those that the reference samples."""
    spec = tiny_spec()
    allowed = ((5,), tuple(range(31, 34)), tuple(range(0, 211, 7)), (210,), ())

    def sampled(driver: Driver) -> list[list[int]]:
        found: list[list[int]] = []
        for temperature in (0.0, 1.0):
            driver.remove_all()
            rows = [
                driver.add(_prompt(9), temperature=temperature, seed=seed, allowed=tokens)
                for seed, tokens in enumerate(allowed)
            ]
            driver.step({row: 9 for row in rows})
            for _ in range(4):
                driver.step({row: 1 for row in rows})
            found += [driver.requests[row].token_ids[9:] for row in rows]
        return found

    got = sampled(Driver(*subject.runner(spec)))
    for tokens, found in zip(allowed * 2, got, strict=True):
        if tokens and not set(found) <= set(tokens):
            raise Failed(f"sampled {found}, allowed are {tokens}")
    _same(got, sampled(Driver(*subject.reference_runner(spec), seed=1)), "tokens under masks")
    return f"{len(allowed)} masks, greedy and at temperature 1"


@check("model.warm")
def check_warm(subject: Subject) -> str:
    """After warmup no step compiles or records anything."""
    runner, config = subject.runner(tiny_spec())
    driver = Driver(runner, config)
    warm = runner.num_programs
    if warm is None:
        raise NotSupported("steps are neither compiled nor recorded, or not before they are needed")
    for length in (1, 7, 33, 129):
        driver.remove_all()
        driver.generate(_prompt(length), 3)
    driver.remove_all()
    rows = [driver.add(_prompt(3), temperature=1.0, seed=seed) for seed in range(3)]
    rows.append(driver.add(_prompt(40), allowed=(1, 2, 3)))
    driver.step({row: 3 for row in rows})
    driver.step({rows[0]: 1, rows[3]: 20}, num_logprobs=3)
    driver.step({rows[3]: 17, rows[1]: 1})
    driver.step({row: 1 for row in rows})
    _same(runner.num_programs, warm, "programs after steps of many shapes")
    return f"{warm} programs before and after"


@check("model.recorded")
def check_recorded(subject: Subject) -> str:
    """Recorded steps give what the same ops give one by one."""
    device, reason = subject.device, "no step is recorded, or no step can run without its recording"
    if device.caps.capture != "graph":
        raise NotSupported(reason)
    from headrace.core.runner.torch import TorchDevice, TorchRunner

    if not isinstance(device, TorchDevice):
        raise NotSupported(reason)
    runner, config = subject.runner(tiny_spec(), params=random_weights)
    eager = subject.keep(TorchRunner(config, device))
    eager.load(random_weights(config.spec))
    recorded, one_by_one = Driver(runner, config), Driver(eager, config)
    worst = 0.0
    for round_ in range(3):  # the second finds what the first has left in the arrays of a recording
        found = []
        for driver in (recorded, one_by_one):
            driver.remove_all()
            rows = [driver.add(_prompt(length, seed=round_)) for length in LENGTHS[round_:]]
            driver.step({row: len(driver.requests[row].token_ids) for row in rows})
            found.append([driver.step({row: 1 for row in rows}, num_logprobs=8).logprobs for _ in range(4)])
        for got, want in zip(*found, strict=True):
            assert got is not None and want is not None, "log probabilities were asked for"
            worst = max(worst, nmse(got.top_values, want.top_values))
    if not worst <= MODEL_TOLERANCE["float32"]:
        raise Failed(f"error {worst:.1e}, allowed {MODEL_TOLERANCE['float32']:.0e}")
    return f"3 rounds of 4 steps, error {worst:.1e}"


@check("memory.kv_plan")
def check_kv_plan(subject: Subject) -> str:
    """KV blocks, in each dtype that they may have, take no more memory than the plan said, allocated again too."""
    found = []
    for kv_dtype in ("", *subject.device.caps.kv_dtypes):
        runner, config = subject.runner(tiny_spec(), kv_dtype=kv_dtype)
        Driver(runner, config, num_blocks=4)
        block_bytes = sum(runner.kv_plan().block_bytes)
        num_blocks = (64 << 20) // block_bytes
        before = runner.memory().used_bytes
        for _ in range(2):
            runner.kv_init([num_blocks] * len(config.groups))
            used, planned = runner.memory().used_bytes - before, num_blocks * block_bytes
            if used > planned * 1.02 + SLACK_BYTES:
                raise Failed(f"{num_blocks} blocks took {format_bytes(used)}, planned {format_bytes(planned)}")
        runner.close()
        found.append(f"{num_blocks} blocks: planned {format_bytes(planned)}, took {format_bytes(used)}")
    return ", ".join(found)


@check("memory.out_of_memory")
def check_out_of_memory(subject: Subject) -> str:
    """A KV cache that cannot fit raises OutOfMemory, and the runner works on with a smaller one."""
    runner, config = subject.runner(tiny_spec())
    prompt = _prompt(20)
    want = Driver(runner, config).generate(prompt, 4)
    # 16 PiB: more than the address space of today's processors.
    num_blocks = (1 << 54) // sum(runner.kv_plan().block_bytes)
    try:
        runner.kv_init([num_blocks] * len(config.groups))
    except OutOfMemory as error:
        _same(Driver(runner, config).generate(prompt, 4), want, "tokens after it")
        return f"said: {error.reason[:80]}"
    raise Failed(f"{num_blocks} blocks were allocated")


@check("memory.leak")
def check_leak(subject: Subject) -> str:
    """200 steps of mixed requests leave memory, and the number of Python's objects, where it was."""
    runner, config = subject.runner(tiny_spec())
    driver = Driver(runner, config)

    def rounds(count: int) -> None:
        for seed in range(count):
            driver.remove_all()
            rows = [driver.add(_prompt(30, seed)), driver.add(_prompt(9, seed))]
            driver.step({rows[0]: 30, rows[1]: 5})
            driver.step({rows[0]: 1, rows[1]: 4})
            for _ in range(8):
                driver.step({row: 1 for row in rows})

    def num_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    rounds(5)
    before, objects = runner.memory().used_bytes, num_objects()
    rounds(20)
    more = num_objects() - objects
    if more >= 100:
        raise Failed(f"{more} more objects after 200 steps")
    grown = runner.memory().used_bytes - before
    if grown > SLACK_BYTES:
        raise Failed(f"{format_bytes(grown)} more after 200 steps")
    return f"{format_bytes(max(grown, 0))} more after 200 steps"


@check("runner.close")
def check_close(subject: Subject) -> str:
    """A runner may be closed twice, and then has none of its memory."""
    kept = 0
    for _ in range(2):  # the first time, libraries take memory for their own
        gc.collect()
        before = subject.device.memory().used_bytes
        runner, config = subject.runner(tiny_spec())
        num_blocks = (128 << 20) // sum(runner.kv_plan().block_bytes)
        Driver(runner, config, num_blocks=num_blocks).generate(_prompt(3), 2)
        runner.close()
        runner.close()
        gc.collect()
        kept = subject.device.memory().used_bytes - before
    if kept > (64 << 20):  # a device may keep its programs
        raise Failed(f"{format_bytes(kept)} of 128 MiB were kept")
    return "closed twice"


def _has_window(subject: Subject) -> bool:
    return "sliding_window" in subject.device.caps.features


def _register() -> None:
    for name, (_, features) in SPECS.items():
        if "states" in features:
            meaning = "states in chunks and in turn with those of other requests give the reference's tokens"
            add_check(f"model.{name}", meaning, partial(_check_states, name))
        meaning = "greedy tokens of a tiny model equal to the reference's"
        add_check(f"model.greedy.{name}", meaning, partial(_check_greedy, name))
    for dtype in DTYPES:
        meaning = "log probabilities of every token of the vocabulary against the reference in float64"
        add_check(f"model.logprobs.{dtype}", meaning, partial(_check_logprobs, dtype))


_register()
