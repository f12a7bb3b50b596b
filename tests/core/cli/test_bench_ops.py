"""bench ops: which calls it finds and how much work they are, against the model's config; what it refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.core.cli import exits
from headrace.core.cli.bench_ops import LOADS, usual_loads

LAYER_OPS = {"linear", "rope", "paged_attention", "write_kv", "act_mul", "split", "split_heads", "merge_heads"}
STEP_OPS = {"embedding", "rotary_angles", "rms_norm", "add_rms_norm", "gather", "sample", "cast"}


def _run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([{"num_seqs": 2, "num_tokens": 1, "context": 20}, {"num_seqs": 1, "num_tokens": 9}]))
    arguments = ["bench", "ops", str(folder), "--load-format", "dummy", "--shapes", str(file), "--min-time", "0"]
    assert exits.run([*arguments, "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_call_of_a_step_is_found(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    result = _run(tiny_llama, tmp_path, capsys, "--device", device, "--dtype", "float32")
    assert (result["device"], result["model"], result["dtype"]) == (device, "tiny-llama", "float32")
    config = json.loads((tiny_llama / "config.json").read_text())
    # A tiny op may be lost beside the loading of its inputs, but then that is said.
    lost = {entry["op"] for entry in result["not_timed"] if entry["load"]}
    found = {row["op"] for row in result["ops"]}
    assert found | lost == LAYER_OPS | STEP_OPS
    rest = {entry["op"] for entry in result["not_timed"] if not entry["load"]}
    assert {"layer_norm", "pack_linear", "grouped_experts"} <= rest and not rest & (found | lost)
    assert {row["load"] for row in result["ops"]} == {"decode 2 at 20", "prefill 9"}
    for row in result["ops"]:
        assert row["seconds"] > 0
        if row["op"] in ("split", "split_heads", "merge_heads"):
            assert row["bytes"] is None and row["gb_per_s"] is None  # nothing need be moved
            continue
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    if device == "reference":
        _check_work(result["ops"], config)


def _check_work(rows: list[dict[str, Any]], config: Mapping[str, Any]) -> None:
    """Work of a decode of two rows at 20 tokens, in float32, by the model's dimensions."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    layers, heads, kv_heads = (
        config[f"num_{what}"] for what in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    head_dim = config.get("head_dim") or hidden // heads
    qkv = (heads + 2 * kv_heads) * head_dim * hidden
    weights = layers * (qkv + heads * head_dim * hidden + 3 * inner * hidden) + vocab * hidden
    decode = [row for row in rows if row["load"] == "decode 2 at 20"]
    linears = [row for row in decode if row["op"] == "linear"]
    assert sum(row["calls"] * row["flop"] for row in linears) == 2 * 2 * weights
    # A product reads its weight and its rows, and writes rows.
    assert sum(row["calls"] * row["bytes"] for row in linears) > 4 * weights
    head = next(row for row in linears if f"[{vocab}, {hidden}]" in row["shape"])
    assert head["bytes"] == 4 * (vocab * hidden + 2 * hidden + 2 * vocab)
    attention = next(row for row in decode if row["op"] == "paged_attention")
    assert attention["calls"] == layers
    assert attention["flop"] == 2 * 2 * 2 * 21 * heads * head_dim
    assert attention["bytes"] == 4 * 2 * (2 * 21 * kv_heads * head_dim + 2 * heads * head_dim)


def test_one_op_and_a_picture(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png, copy = tmp_path / "roof.png", tmp_path / "copy.json"
    options = ["--device", "cpu", "--op", "linear", "--op", "gated_delta", "--png", str(png), "--output", str(copy)]
    # Products of many tokens, in more rounds than five, are not lost beside their inputs on a busy machine either.
    large = tmp_path / "large.json"
    large.write_text('[{"num_seqs": 1, "num_tokens": 100}]')
    result = _run(tiny_llama, tmp_path, capsys, *options, "--shapes", str(large), "--min-time", "0.1")
    assert json.loads(copy.read_text()) == result
    assert {row["op"] for row in result["ops"]} == {"linear"}
    assert {"op": "gated_delta", "load": "", "reason": "no step of this model calls it"} in result["not_timed"]
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_table(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "loads.json"
    file.write_text('[{"num_seqs": 1, "num_tokens": 2}]')
    arguments = ["bench", "ops", str(tiny_llama), "--load-format", "dummy", "--device", "cpu", "--op", "linear"]
    assert exits.run([*arguments, "--op", "softcap", "--shapes", str(file), "--min-time", "0"]) == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "prefill 2" in out
    assert "softcap" in out.split("not timed")[1]


def test_the_usual_loads_have_names() -> None:
    assert [load.name for load in LOADS] == [
        "decode 1 at 512", "decode 1 at 4096", "decode 8 at 512", "prefill 512", "prefill 2048",
    ]  # fmt: skip


def test_short_models_get_the_loads_that_they_take(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usual_loads(8192) == LOADS
    assert [load.name for load in usual_loads(1024)] == ["decode 1 at 512", "decode 8 at 512", "prefill 512"]
    assert [load.name for load in usual_loads(77)] == ["decode 1 at 37", "prefill 38"]
    assert all(load.context + load.num_tokens <= n for n in range(1, 600) for load in usual_loads(n))
    options = ["--device", "cpu", "--load-format", "dummy", "--op", "add", "--min-time", "0.001"]
    assert exits.run(["bench", "ops", str(tiny_llama), *options]) == 0  # 4096 positions
    assert "decode 1 at 4096" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "content", "code", "reason"),
    [
        (["--op", "linaer"], "", 2, "there is no op linaer"),
        (["--device", "null"], '[{"num_seqs": 1, "num_tokens": 2}]', 5, "there is no table of ops"),
        ([], "{", 2, "holds no shapes"),
        ([], '[{"rows": 3}]', 2, "holds no shapes"),
        ([], "[]", 2, "holds no shapes"),
        ([], '[{"num_seqs": 0, "num_tokens": 2}]', 2, "at least one sequence"),
        ([], '[{"num_seqs": 1, "num_tokens": 9999999}]', 2, "prefill 9999999: more tokens than the"),
        ([], '[{"num_seqs": true, "num_tokens": 1}]', 2, "num_seqs must be a whole number, got True"),
        ([], '[{"num_seqs": 1, "num_tokens": 1, "context": 5.5}]', 2, "context must be a whole number, got 5.5"),
        (["--output", "/proc/nowhere/x.json"], "", 2, "cannot write /proc/nowhere/x.json: No such file"),
    ],
)
def test_what_is_refused(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    content: str,
    code: int,
    reason: str,
) -> None:
    file = tmp_path / "loads.json"
    file.write_text(content)
    arguments = ["bench", "ops", str(tiny_llama), "--device", "cpu", "--load-format", "dummy", *options]
    assert exits.run([*arguments, *(["--shapes", str(file)] if content else [])]) == code
    assert reason in capsys.readouterr().err


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert exits.run(["bench", "ops", "--png", "x.png"]) == 5
    assert "needs matplotlib" in capsys.readouterr().err
