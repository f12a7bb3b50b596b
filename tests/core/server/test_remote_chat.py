"""`headrace chat --url` against a live server."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.core.cli import exits
from headrace.core.cli.remote import RemoteChat
from headrace.core.errors import ConfigError, HeadraceError, RequestError
from live_server import LiveServer
from moody_platform import install

_PROGRAM = "from headrace.core.cli import main; main()"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_answers_are_the_models(server: LiveServer, llm: LLM, suffix: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    wanted = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    remote = RemoteChat(server.url + suffix)
    assert remote.model == "tiny"
    assert "".join(remote.stream(messages, {"temperature": 0, "max_tokens": 20})) == wanted


def test_a_conversation(
    server: LiveServer, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd?\n/exit\n"))
    code = exits.run(["chat", "--url", server.url, "--temperature", "0", "--max-tokens", "9"])
    signal.signal(signal.SIGINT, before)
    assert code == 0
    params = SamplingParams(temperature=0, max_tokens=9)
    messages = [{"role": "user", "content": "Hello"}]
    texts = []
    for following in ("And?", ""):
        texts.append(llm.chat(messages, params)[0].outputs[0].text)
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": following}]
    written = capsys.readouterr().out
    assert written == "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_errors(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        RemoteChat("ftp://x")
    with pytest.raises(HeadraceError, match="no server at"):
        RemoteChat("http://127.0.0.1:9")
    with pytest.raises(RequestError, match="404"):
        RemoteChat(server.url + "/nope")
    with pytest.raises(RequestError, match="no model 'other'"):
        list(RemoteChat(server.url, model="other").stream([{"role": "user", "content": "x"}], {}))


@pytest.mark.parametrize(
    "url", ["", "http://", "http://127.0.0.1:99999", "http://[::1", "file:///x", "http://a b", "x\n"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of a server"):
        RemoteChat(url)


def _answered(*replies: bytes) -> str:
    """The address of a server that gives each connection the next reply, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _reply(body: str, *, status: str = "200 OK", missing: int = 0) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body) + missing}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (_reply("[1, 2]"), "lists no models as OpenAI's API does"),
        (_reply("hello"), "lists no models as OpenAI's API does"),
        (_reply('{"data": 5}'), "lists no models as OpenAI's API does"),
        (_reply('{"data": [{}]}'), "lists no models as OpenAI's API does"),
        (_reply('{"data": [', missing=9), "lists no models as OpenAI's API does"),
        (_reply('{"data": []}'), "lists no model"),
        (b"garbage\r\n\r\n", "no server at http://127.0.0.1:"),
        (b"", "Remote end closed connection without response"),
        (_reply("<html>\n  <p>" + "x" * 1000, status="404 Nope"), "the server answers 404: <html> <p>xxx"),
    ],
)
def test_servers_that_speak_something_else(reply: bytes, problem: str) -> None:
    with pytest.raises(HeadraceError) as error:
        RemoteChat(_answered(reply))
    assert problem in error.value.reason
    assert "\n" not in error.value.reason and len(error.value.reason) < 400


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ("data: {\n\n", "no stream of OpenAI's API"),
        ("data: [1]\n\n", "no stream of OpenAI's API"),
        ("data: 5\n\n", "no stream of OpenAI's API"),
        ('data: {"choices": [5]}\n\n', "no stream of OpenAI's API"),
        ('data: {"choices": 5}\n\n', "no stream of OpenAI's API"),
        ('data: {"error": "boo"}\n\n', "the server broke the answer off: boo"),
    ],
)
def test_streams_of_something_else(stream: str, problem: str) -> None:
    remote = RemoteChat(_answered(_reply('{"data": [{"id": "a"}]}'), _reply(stream)))
    with pytest.raises(RequestError, match=problem):
        list(remote.stream([{"role": "user", "content": "x"}], {}))


def test_ctrl_c_stops_an_answer_and_the_request(model_folder: Path, tmp_path: Path) -> None:
    env = install(tmp_path / "site", step_s=0.005) | {"HEADRACE_LOAD_FORMAT": "dummy", "HEADRACE_API_KEY": "k"}
    with LiveServer(model_folder, "--kv-memory", "8MiB", env=env, device="moody") as running:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "chat", "--url", running.url, "--api-key", "k", "--max-tokens", "3900"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        running.wait_for("aborted by client", 10)
        _, log = process.communicate(b"/exit\n", timeout=30)
        assert process.returncode == 0 and b"(stopped)" in log
