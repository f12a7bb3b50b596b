"""The Pallas kernels, interpreted, against the definitions: through the conformance kit and against numpy."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses

import numpy as np
import pytest

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.plugin_loader import load_plugins

pytest.importorskip("jax", reason="jax is not installed: pip install 'headrace[tpu]'")
import jax
import jax.numpy as jnp

from headrace.core.ops.jax import FUNCTIONS
from headrace.core.self_test import tiny_config, tiny_spec
from headrace.kernels.pallas import attention, write_kv
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    device = open_device(EngineConfig(device=DeviceConfig(device="tpu:emulated", threads=1)))
    return Subject(device, load_plugins())


@pytest.mark.parametrize(
    "check",
    [
        "attention.plain.float32",
        "attention.window_softcap.bfloat16",
        "attention.sinks.float32",
        "attention.alibi.float32",
        "attention.all_kv_heads.bfloat16",
        "model.greedy.window",
        "attention.int8_cache.bfloat16",
        "attention.int8_cache_decode.float32",
        "attention.chunk.float32",
        "ops.latent_heads.float32",
        *(
            pytest.param(f"attention.{name}.{dtype}", marks=pytest.mark.slow)
            for name in ("one_kv_head", "large", "large_window", "softcap", "window_of_a_block")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_conformance(check: str, subject: Subject) -> None:
    result = run_check(all_checks()[check], subject)
    assert result.outcome == "passed", result.detail


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_the_emulated_device_runs_the_kernels(kv_dtype: str, subject: Subject) -> None:
    runner = subject.device.runner(dataclasses.replace(tiny_config(tiny_spec()), kv_dtype=kv_dtype))
    providers = {selection.op: selection.provider for selection in runner.op_selections}
    assert providers["paged_attention"] == providers["write_kv"] == "pallas"
    ops = runner.ops
    assert ops is not None
    cache = FUNCTIONS["new_kv_cache"](
        num_blocks=4, block_size=16, num_kv_heads=2, head_dim=16, dtype=kv_dtype or "float32", device=None
    )
    arguments = (jnp.zeros((3, 4, 16)), cache, jnp.array([0, 3]), jnp.array([3]), jnp.array([[1]]))
    program = jax.make_jaxpr(lambda *a: ops.paged_attention(*a, scale=1.0))(*arguments)
    assert "pallas_call" in str(program)
    rows = jnp.zeros((3, 2, 16))
    program = jax.make_jaxpr(ops.write_kv)(cache, rows, rows, jnp.array([17, 18, -1]))
    assert "pallas_call" in str(program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_are_written_in_any_order(dtype: str) -> None:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((6, 2, 8, 32)).astype(np.float32)
    slots = rng.permutation(np.arange(8, 48))[:20].astype(np.int32)
    slots[[3, 11]] = -1
    rows = rng.standard_normal((20, 2, 32)).astype(np.float32)
    narrow = jnp.dtype(dtype)
    stored, written = jnp.asarray(cache).astype(narrow), jnp.asarray(rows).astype(narrow)
    want = np.array(stored.astype(jnp.float32))
    for slot, row in zip(slots, np.array(written.astype(jnp.float32)), strict=True):
        if slot >= 0:
            want[slot // 8, :, slot % 8] = row
    got = write_kv.write_kv(stored, written, jnp.asarray(slots), interpret=True)
    assert np.array_equal(np.asarray(got.astype(jnp.float32)), want)


def test_tiles_of_wide_heads_are_small() -> None:
    assert attention.tile_tokens(32, 128, 16) == attention.tile_tokens(16, 576, 16) == 16
    # DeepSeek-V3 on one device, whose tiles of 16 tokens libtpu's compiler refuses, and on eight.
    assert attention.tile_tokens(128, 576, 16) == 4
    assert attention.tile_tokens(2048, 576, 16) == 1


def test_long_tables_are_left_to_plain_jax() -> None:
    assert attention.table_fits((64, 512))
    assert not attention.table_fits((64, 8192))


def test_what_is_fetched_ahead_of_the_last_token_is_a_block_of_the_cache() -> None:
    """The grid ends behind the last slot, but a chip may ask early which block comes next."""
    for mapping, stored in (([-1, 7, -1, 3], [3, 7]), ([-1, -1], []), ([2], [2])):
        slots, order, count = write_kv._in_order(jnp.array(mapping, jnp.int32))
        assert int(count) == len(stored) and slots[: len(stored)].tolist() == stored
        assert not slots[len(stored) :].any(), "the null block"
        assert [mapping[i] for i in order[: len(stored)].tolist()] == stored
