"""What runs out: connections, file descriptors, room on disk, patience for a body that is too large."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from live_server import LiveServer
from moody_platform import install

_PROGRAM = "from headrace.core.cli import main; main()"


@pytest.mark.slow
def test_a_body_of_100_megabytes(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB") as server:
        front = psutil.Process(server.process.pid)
        before = front.memory_info().rss
        part = b'{"prompt": "' + b"x" * 2**20

        def chunks() -> Iterator[bytes]:
            for _ in range(100):
                yield part

        for content in (chunks(), b"".join(chunks())):  # without and with content-length
            response = httpx.post(f"{server.url}/v1/completions", content=content, timeout=60)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        # What was read up to the limit is given back; the limit itself is 32 MiB.
        assert front.memory_info().rss - before < 48 * 2**20
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_a_thousand_idle_connections(model_folder: Path) -> None:
    with LiveServer(model_folder, "--kv-memory", "8MiB") as server:
        front = psutil.Process(server.process.pid)
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        idle = [socket.create_connection(address) for _ in range(1000)]
        try:
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
            assert front.num_fds() > 1000
            cpu_s = sum(front.cpu_times()[:2])
            time.sleep(1)
            assert sum(front.cpu_times()[:2]) - cpu_s < 0.2, "idle connections cost time"
        finally:
            for sock in idle:
                sock.close()
        deadline_s = time.monotonic() + 10
        while front.num_fds() > 100:
            assert time.monotonic() < deadline_s, front.num_fds()
            time.sleep(0.1)


def test_logs_on_a_full_disk(model_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["serve", str(model_folder), "--device", "null", "--load-format", "dummy", "--kv-memory", "8MiB"]
    with open("/dev/full", "w") as full:  # each write fails with ENOSPC
        server = subprocess.Popen([sys.executable, "-c", _PROGRAM, *command, "--port", str(port)], stderr=full)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert server.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        for body in ({"prompt": "x", "max_tokens": 3}, {"prompt": ""}):
            response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            assert response.status_code == (200 if body["prompt"] else 400)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; only root can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mount.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_batch_on_a_full_disk_goes_on_when_there_is_room(
    model_folder: Path, small_disk: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", small_disk / "out.jsonl"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 10, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": i}}
        for i in range(200)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(model_folder), "--device", "null", "--load-format", "dummy", "--kv-memory", "8MiB"]
    command = [sys.executable, "-c", _PROGRAM, "run-batch", str(source), str(target), *options]
    full = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert full.returncode == 4, full.stderr
    assert f"no space left to write {target}" in full.stderr and "Traceback" not in full.stderr
    assert "the same command goes on from there" in full.stderr
    answered = [line for line in target.read_text().split("\n") if line.endswith("}")]
    assert 0 < len(answered) < 200
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(str(line["custom_id"]) for line in lines)
    assert all(answer["response"]["status_code"] == 200 for answer in answers)


@pytest.mark.slow
def test_many_streams_and_few_files(model_folder: Path, tmp_path: Path) -> None:
    env = {**install(tmp_path / "site", step_s=0.005), "HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_KV_MEMORY": "8MiB"}
    with LiveServer(model_folder, env=env, device="moody") as server:
        front = psutil.Process(server.process.pid)
        limit = front.num_fds() + 20
        front.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        body = json.dumps({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        streams = []
        for _ in range(60):  # three times as many as may be open
            sock = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
            sock.settimeout(60)
            streams.append(sock)
        ends = []
        for sock in streams:
            with sock, contextlib.suppress(ConnectionError), sock.makefile("rb") as file:
                sock.sendall(head.encode() + body)
                ends.append(file.read()[-21:])
        # The event loop closes connections that it has no descriptor for; those that it took are served whole.
        whole = ends.count(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert whole >= 10 and set(ends) <= {b"data: [DONE]\n\n\r\n0\r\n\r\n", b""}
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert os.path.exists(f"/proc/{server.engine.pid}"), "the engine is the same"
        assert server.metric("headrace_engine_restarts_total") == 0
        server.wait_idle()


def test_an_engine_that_dies_when_no_file_descriptor_is_left_comes_back(model_folder: Path) -> None:
    with (
        LiveServer(model_folder, "--kv-memory", "8MiB") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,  # its connection stays
    ):
        front, pid = psutil.Process(server.process.pid), server.engine.pid
        time.sleep(1.5)
        client.get("/readyz")
        limit = max(int(name) for name in os.listdir(f"/proc/{front.pid}/fd")) + 1
        front.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        idle = [socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) for _ in range(60)]
        try:
            time.sleep(0.5)
            server.engine.kill()
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.status_code == 200
            assert server.engine.pid != pid and front.is_running()
        finally:
            for sock in idle:
                sock.close()
