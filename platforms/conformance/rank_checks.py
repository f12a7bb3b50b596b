"""A model on two ranks: what collectives give, and the tokens of a tiny model that is cut over them."""

import dataclasses

import numpy as np

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import EMULATED, open_device
from headrace.core.errors import DeviceUnavailable, Unsupported
from headrace.core.models.spec import MlpSpec, ModelSpec, MoeSpec
from headrace.core.platform import Runner, RunnerConfig
from headrace.core.self_test import TOLERANCE, Driver, load_runner, nmse, tiny_config, tiny_spec

from .registry import Failed, NotSupported, Subject, check
from .values import random_weights

NUM_RANKS = 2


@check("ranks.collectives")
def check_collectives(subject: Subject) -> str:
    """Sums over two ranks and arrays side by side against float64, the same bits on both."""
    runner, _ = _two_ranks(subject, tiny_spec())
    rng = np.random.default_rng(0)
    worst = 0.0
    shapes = ((1, 1), (1, 64), (3, 7), (129, 96))
    for shape in shapes:
        parts = [rng.standard_normal(shape).astype(np.float32) for _ in range(NUM_RANKS)]
        wide = [part.astype(np.float64) for part in parts]
        for name, want in (("all_reduce", np.sum(wide, 0)), ("all_gather", np.concatenate(wide, -1))):
            first, second = runner.collective(name, parts)
            if first.tobytes() != second.tobytes():
                raise Failed(f"{name} of {shape}: the ranks have different bits")
            worst = max(worst, nmse(first, want))
    if not worst <= TOLERANCE["float32"]:
        raise Failed(f"error {worst:.1e}, allowed {TOLERANCE['float32']:.0e}")
    return f"{len(shapes)} shapes, error {worst:.1e}"


@check("ranks.tokens")
def check_tokens(subject: Subject) -> str:
    """A tiny model with biases, experts and a vocabulary that are cut over two ranks gives the reference's tokens."""
    spec = _spec()
    driver = Driver(*_two_ranks(subject, spec))
    oracle = Driver(*subject.reference_runner(spec, params=random_weights), seed=1)
    lengths = (1, 17, 40)
    for length in lengths:
        prompt = [(7 * i + length) % spec.vocab_size for i in range(length)]
        want, got = oracle.generate(prompt, 8), driver.generate(prompt, 8)
        if got != want:
            raise Failed(f"prompt of {length}: {got}, expected {want}")
    return f"{len(lengths)} prompts, 8 tokens each, equal to the reference"


def _spec() -> ModelSpec:
    """Grouped queries, a bias on every projection, a dense layer and one of experts."""
    spec = tiny_spec()
    mlp = MlpSpec(intermediate_size=96, bias=True)
    moe = MoeSpec(num_experts=4, num_experts_per_token=2, intermediate_size=40, bias=True, shared=mlp)
    attn = dataclasses.replace(spec.layers[0].attn, qkv_bias=True, o_bias=True)
    layers = (
        dataclasses.replace(spec.layers[0], attn=attn, mlp=mlp),
        dataclasses.replace(spec.layers[1], attn=attn, moe=moe),
    )
    return dataclasses.replace(spec, vocab_size=212, layers=layers, lm_head_bias=True)


def _two_ranks(subject: Subject, spec: ModelSpec) -> tuple[Runner, RunnerConfig]:
    """A runner of the device under test on two ranks. Raises NotSupported where there are none."""
    name, _, ids = subject.device.info.id.partition(":")
    wanted = f"{name}:{EMULATED}" if ids == EMULATED else name
    engine = EngineConfig(device=DeviceConfig(device=wanted, threads=1, tensor_parallel_size=NUM_RANKS))
    try:
        device = open_device(engine, subject.plugins)
    except (DeviceUnavailable, Unsupported) as error:
        raise NotSupported(error.reason) from error
    config = dataclasses.replace(tiny_config(spec, block_size=subject.block_size), engine=engine)
    return subject.keep(load_runner(device, config, params=random_weights)), config
