"""`headrace run-batch`: OpenAI's batch format, whole and resumed, against the Python API."""

import errno
import fcntl
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, RequestError
from headrace.core.server.batch import read_answers, read_batch, run_batch

_PROGRAM = "from headrace.core.cli import main; main()"


def write_batch(path: Path, count: int, **body: Any) -> Path:
    """A batch of completions, their prompts numbered."""
    lines = [
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": f"Number {i}", "max_tokens": 10, "temperature": 0, **body},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(source: Path, target: Path, model: Path, *more: str) -> list[str]:
    """The command line."""
    options = ["--model", str(model), "--device", "null", "--load-format", "dummy", "--kv-memory", "8MiB", *more]
    return [sys.executable, "-c", _PROGRAM, "run-batch", str(source), str(target), *options]


def run(source: Path, target: Path, model: Path, *more: str) -> dict[str, Any]:
    """Run it to its end; the summary."""
    done = subprocess.run(
        command(source, target, model, "--json", *more), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def answers(path: Path) -> dict[str, Any]:
    """Answers by custom_id; each stands there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def wait_for_answers(process: "subprocess.Popen[Any]", target: Path) -> None:
    """Until the running process has written some."""
    deadline_s = time.monotonic() + 60
    while not target.exists() or not target.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_batch(tmp_path: Path, model_folder: Path, llm: LLM) -> None:
    source = write_batch(tmp_path / "in.jsonl", 5)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    bad = {**chat, "temperature": -3}
    with source.open("a") as file:
        for name, body, url in (
            ("chat", chat, "/v1/chat/completions"),
            ("bad", bad, "/v1/chat/completions"),
            (
                "response",
                {"model": "tiny", "input": "hi", "max_output_tokens": 4, "background": True},
                "/v1/responses",
            ),
            ("other", {"model": "tiny", "input": "x"}, "/v1/embeddings"),
        ):
            file.write("\n" + json.dumps({"custom_id": name, "url": url, "method": "POST", "body": body}) + "\n")
    target = tmp_path / "out.jsonl"
    summary = run(source, target, model_folder)
    assert (summary["num_requests"], summary["num_completed"], summary["num_failed"]) == (9, 7, 2)
    found = answers(target)
    params = SamplingParams(temperature=0, max_tokens=10)
    for i in range(5):
        answer = found[f"request-{i}"]
        assert answer["error"] is None and answer["id"].startswith("batch_req")
        assert answer["response"]["status_code"] == 200
        wanted = llm.generate(f"Number {i}", params)[0].outputs[0].text
        assert answer["response"]["body"]["choices"][0]["text"] == wanted
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["response"]["response"]["body"]["object"] == "response"
    assert found["response"]["response"]["body"]["usage"]["output_tokens"] == 4
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["code"] == "invalid_sampling_params"
    assert found["other"]["response"]["status_code"] == 404

    again = run(source, target, model_folder)
    assert (again["num_skipped"], again["num_completed"]) == (9, 0)


def test_requests_without_a_seed_get_one_by_their_name(tmp_path: Path, model_folder: Path) -> None:
    source = write_batch(tmp_path / "in.jsonl", 4, temperature=1)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed(source.read_text().splitlines(keepends=True))))

    def texts(source: Path, *options: str) -> dict[str, str]:
        target = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        run(source, target, model_folder, *options)
        return {name: line["response"]["body"]["choices"][0]["text"] for name, line in answers(target).items()}

    first = texts(source)
    assert texts(turned) == first and len(set(first.values())) == 4
    other = texts(source, "--seed", "1")
    assert all(other[name] != first[name] for name in first)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_batch_that_was_broken_off_goes_on(tmp_path: Path, model_folder: Path, number: signal.Signals) -> None:
    source = write_batch(tmp_path / "in.jsonl", 300, max_tokens=200, ignore_eos=True)
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        command(source, target, model_folder, "--max-num-seqs", "8"),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup is heeded, and these tests may run under it
    )
    wait_for_answers(process, target)
    process.send_signal(number)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 128 + number, log
    assert "goes on from there" in log
    num_before = len(target.read_text().splitlines())
    assert 0 < num_before < 300
    with target.open("a") as file:
        file.write('{"id": "batch_req-1", "custom_id": "requ')  # cut off by a crash
    summary = run(source, target, model_folder)
    assert (summary["num_skipped"], summary["num_completed"]) == (num_before, 300 - num_before)
    assert set(answers(target)) == {f"request-{i}" for i in range(300)}


def test_two_runs_on_one_output(tmp_path: Path, model_folder: Path) -> None:
    source = write_batch(tmp_path / "in.jsonl", 60, max_tokens=200, ignore_eos=True)
    target, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(target)
    first = subprocess.Popen(command(source, target, model_folder), stderr=subprocess.DEVNULL)
    try:
        wait_for_answers(first, target)
        first.send_signal(signal.SIGSTOP)  # in the midst, however fast it is
        before = target.read_bytes()
        for same in (target, link):
            second = subprocess.run(command(source, same, model_folder), capture_output=True, text=True, timeout=60)
            assert second.returncode == 2
            assert f"error: another run of `headrace run-batch` is writing {same}\n  try: the same" in second.stderr
        assert target.read_bytes() == before
        other = run(source, tmp_path / "other.jsonl", model_folder)
        assert other["num_completed"] == 60
    finally:
        first.kill()
        first.wait()
    summary = run(source, target, model_folder)  # no lock is left of what was killed
    assert 0 < summary["num_skipped"] < 60
    assert set(answers(target)) == {f"request-{i}" for i in range(60)}


def test_a_file_system_without_locks(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(_file: Any, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    source, target = write_batch(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    config = EngineConfig.from_options(
        {"model": str(model_folder), "device": "null", "load_format": "dummy", "kv_memory": "8MiB"}
    )
    with caplog.at_level(logging.WARNING):
        assert run_batch(config, source, target).num_completed == 2
    assert f"{target} cannot be locked (No locks available)" in caplog.text
    assert set(answers(target)) == {"request-0", "request-1"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no request"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not an object"),
        ("[" * 100_000, "line 1: not JSON (nested too deeply)"),
        ('{"url": "/v1/completions", "body": {}}', "line 1: no custom_id"),
        ('{"custom_id": "a", "url": "/v1/files", "body": {}}', "line 1: url"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "line 1: method"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "line 1: no body"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "line 2: custom_id 'a' stands in line 1"),
    ],
)
def test_files_that_are_no_batch(tmp_path: Path, text: str, problem: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(RequestError, match="in.jsonl") as error:
        list(read_batch(source))
    assert problem in str(error.value)


def test_answers_that_are_none(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    assert read_answers(target) == set()
    a, b = (json.dumps({"id": f"batch_req_{id}", "custom_id": id, "response": {}}) for id in "ab")
    target.write_text(f"{a}\n{b}")  # whole, but for the newline
    assert read_answers(target) == {"a", "b"}
    assert target.read_text() == f"{a}\n{b}\n"
    target.write_text(f"{a}\n{b[:-5]}")
    assert read_answers(target) == {"a"}
    assert target.read_text() == f"{a}\n"
    question = '{"custom_id": "a", "url": "/v1/completions", "body": {}}'
    for text in ("dear diary\n", "dear diary", f"{a}\ndear diary", question, f"{question}\n", "[" * 100_000, "5"):
        target.write_text(text)
        with pytest.raises(RequestError, match=f"line {1 + text.startswith(a)} is no answer"):
            read_answers(target)
        assert target.read_text() == text  # somebody's file stays as it is


def test_files_that_a_batch_does_not_take(tmp_path: Path) -> None:
    source = write_batch(tmp_path / "in.jsonl", 1)
    before = source.read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link.jsonl").symlink_to(source)
    for given, target, problem in (
        (source, tmp_path, "the output of a batch must be a file"),
        (source, Path("/dev/full"), "the output of a batch must be a file"),
        (source, Path("-"), "the output of a batch must be a file"),
        (pipe, tmp_path / "out.jsonl", "the input of a batch must be a file"),
        (Path("-"), tmp_path / "out.jsonl", "the input of a batch must be a file"),
        (source, source, "is the input and the output"),
        (source, tmp_path / "link.jsonl", "is the input and the output"),
    ):
        with pytest.raises(RequestError, match=problem):
            run_batch(EngineConfig(), given, target)
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        run_batch(EngineConfig(), source, tmp_path / "nowhere" / "out.jsonl")
    assert source.read_text() == before


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    source = write_batch(tmp_path / "in.jsonl", 2)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n"))
    assert [line["custom_id"] for line in read_batch(source)] == ["request-0", "request-1"]


def test_a_disk_that_is_full_in_the_midst(tmp_path: Path, model_folder: Path) -> None:
    """The limit on a file's size stands in for the disk's."""
    source, target = write_batch(tmp_path / "in.jsonl", 40, max_tokens=50, ignore_eos=True), tmp_path / "out.jsonl"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    done = subprocess.run(
        command(source, target, model_folder), capture_output=True, text=True, preexec_fn=limit, timeout=120
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert f"error: cannot write {target}: File too large" in done.stderr
    summary = run(source, target, model_folder)
    assert summary["num_skipped"] > 0
    assert set(answers(target)) == {f"request-{i}" for i in range(40)}
