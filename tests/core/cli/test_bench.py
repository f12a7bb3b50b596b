"""bench offline on the null platform: exact counts, figures that follow from times, files that are refused."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.cli import bench_offline, exits

OPTIONS = ["--device", "null", "--load-format", "dummy", "--kv-memory", "64MiB", "--repeat", "2", "--json"]


@pytest.fixture(autouse=True)
def restore_interrupt_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[tuple[int, int]], str]]:
    """What was really run: [(prompt length, output length), ...] and the salt of each run."""
    seen: list[tuple[list[tuple[int, int]], str]] = []
    original = bench_offline._run
    rests: list[float] = []
    monkeypatch.setattr("headrace.core.cli.bench_offline.time.sleep", rests.append)

    def record(llm: Any, requests: Any, salt: str, rest_s: float = 0) -> Any:
        result = original(llm, requests, salt, rest_s)
        is_second = salt.startswith("W1") and salt == (seen[-1][1] if seen else "")
        assert rests.pop() == (0 if salt == "warm" or is_second else 1), "a second before each run, by default"
        lengths = [(len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in result.outputs]
        assert all(output.num_cached_tokens == 0 for output in result.outputs) or salt.startswith("W4")
        seen.append((lengths, salt))
        return result

    monkeypatch.setattr(bench_offline, "_run", record)
    return seen


def test_random_requests(
    tiny_llama: Path, runs: list[tuple[list[tuple[int, int]], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-prompts", "64", "--input-len", "33", "--output-len", "8"]
    assert exits.run(["bench", "offline", str(tiny_llama), *sizes, *OPTIONS]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [lengths for lengths, _ in runs] == [[(33, 2)] * 64, [(33, 8)] * 64, [(33, 8)] * 64]
    assert (result["model"], result["device"], result["repeat"]) == ("tiny-llama", "null", 2)
    figures = result["workloads"]["random"]
    assert figures["total_tokens_per_s"] == pytest.approx(figures["output_tokens_per_s"] * (33 + 8) / 8)
    step = result["workloads"]["step"]
    # Of 8 tokens the prefill gives the first, the first full step is not counted, and the last one finishes.
    assert step["num_reqs"] == 64
    assert 0 < step["steps"] <= 2 * 6
    parts = [step[f"{name}_us"] for name in ("schedule", "runner", "commit", "output")]
    assert sum(parts) == pytest.approx(step["step_us"])
    assert all(part > 0 for part in parts[:3])


def _request(num_prompt: int, num_output: int, first: int = 0) -> dict[str, Any]:
    return {"p": [(first + i) % 512 for i in range(num_prompt)], "n": num_output}


def test_workload_file(
    tiny_llama: Path,
    tmp_path: Path,
    runs: list[tuple[list[tuple[int, int]], str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = list(range(64))
    data = {
        "warm": [_request(3, 2)],
        "W1": [[_request(20, 1, i), _request(20, 9, i + 100)] for i in range(5)],
        "W2": [_request(300, 1, i) for i in range(4)],
        "W3": [_request(10, 5), _request(20, 7)],
        "W4": [[{"p": [*shared, set_, i], "n": 3} for i in range(4)] for set_ in range(3)],
        "W5": [_request(5, 5)],
    }
    file = tmp_path / "workloads.json"
    file.write_text(json.dumps(data))
    assert exits.run(["bench", "offline", str(tiny_llama), "--workload", str(file), *OPTIONS]) == 0
    result = json.loads(capsys.readouterr().out)["workloads"]
    assert list(result) == ["W1", "W2", "W3", "W4"]
    assert set(result["W1"]) == {"ttft_ms", "decode_tokens_per_s"}
    assert set(result["W2"]) == {"prefill_tokens_per_s"}
    assert set(result["W3"]) == set(result["W4"]) == {"wall_s", "output_tokens_per_s", "total_tokens_per_s"}
    expected = [[(3, 2)], *([[(20, 1)], [(20, 9)]] * 3), *([[(300, 1)]] * 2), *([[(10, 5), (20, 7)]] * 2)]
    assert [lengths for lengths, _ in runs] == [*expected, *([[(66, 3)] * 4] * 2)]
    assert len({salt for _, salt in runs}) == len(runs) - 3  # only the two halves of a pair share a salt


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ("[1", [], "is not JSON"),
        ("[]", [], "has no workload 'W1' that can be run; it has none"),
        ('{"W3": [{"p": [1], "n": 1}]}', [], "has no workload 'W1' that can be run; it has W3"),
        ('{"W3": []}', ["--select", "W3"], "W3 must be a list of requests, and not empty"),
        ('{"W3": [{"p": [1]}]}', ["--select", "W3"], 'W3: a request is {"p": [token ids], "n": count}'),
        ('{"W3": [{"p": [], "n": 1}]}', ["--select", "W3"], "at least one token of prompt and of output"),
        ('{"W1": [{"p": [1], "n": 1}]}', ["--select", "W1"], "W1 must be a list of requests, and not empty"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, options: list[str], reason: str
) -> None:
    file = tmp_path / "workloads.json"
    file.write_text(content)
    assert exits.run(["bench", "offline", "--workload", str(file), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["bench", "offline", "--workload", "/no/such.json"]) == 2
    assert "cannot read the workload /no/such.json: No such file" in capsys.readouterr().err


def test_token_ids_outside_the_vocabulary(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "workloads.json"
    file.write_text('{"W3": [{"p": [1, 512], "n": 1}]}')
    arguments = ["bench", "offline", str(tiny_llama), "--workload", str(file), "--select", "W3", *OPTIONS]
    assert exits.run(arguments) == 2
    assert "token id 512 is outside the vocabulary of 512" in capsys.readouterr().err
