"""Model strings to files: paths, the hub's cache, and downloads from a small hub that runs in this process."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from headrace.core import hub
from headrace.core.config import ModelConfig
from headrace.core.errors import CapacityError, ModelError, ModelNotFound
from headrace.core.hub import resolve_config, resolve_model, resolve_tokenizer
from headrace.core.progress import bytes_under

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = bytes(range(256)) * 400
REVISION = "0123456789abcdef0123456789abcdef01234567"


# ---- a hub ------------------------------------------------------------------------------------------------
@dataclass
class FakeHub:
    """Serves repositories as the hub does: {repo: {file: bytes}}; counts the bytes of files it sent."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    tells_sizes: bool = True
    stalls: bool = False
    damaged: dict[str, bytes] = field(default_factory=dict)
    num_bytes_sent: int = 0
    url: str = ""


def _etag(data: bytes) -> str:
    """SHA-256 of a large file, git's blob id of a small one."""
    if len(data) > 1000:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _handler(fake: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            if path[:2] == ["api", "models"]:
                self._api("/".join(path[2:4]), path[4:])
            else:
                self._file("/".join(path[:2]), "/".join(path[4:]))

        def _api(self, repo: str, rest: list[str]) -> None:
            if self._refused(repo):
                return
            if rest[:1] == ["revision"] and rest[1] not in ("main", REVISION):
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            files = fake.repos[repo]
            if rest[:1] == ["tree"]:
                tree = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
                self._answer(200, json.dumps(tree).encode())
                return
            siblings = [
                {"rfilename": name, "size": len(data) if fake.tells_sizes else None} for name, data in files.items()
            ]
            info = {"id": repo, "modelId": repo, "sha": REVISION, "siblings": siblings, "tags": [], "downloads": 0}
            self._answer(200, json.dumps({**info, "likes": 0, "private": False}).encode())

        def _file(self, repo: str, name: str) -> None:
            if self._refused(repo):
                return
            data = fake.repos[repo].get(name)
            if data is None:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
                return
            headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": REVISION}
            data = fake.damaged.get(name, data)
            if self.command == "HEAD":
                self._answer(200, data, headers)
                return
            fake.sent.append(name)
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            body = data[begin:]
            stalls = fake.stalls and name.endswith(".safetensors")
            self._answer(206 if begin else 200, body, headers, sent=body[: len(body) // 2] if stalls else body)
            if stalls:
                time.sleep(30)

        def _refused(self, repo: str) -> bool:
            if repo in fake.gated:
                self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif repo not in fake.repos:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return repo in fake.gated or repo not in fake.repos

        def _answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, *, sent: bytes | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body if sent is None else sent)
                self.wfile.flush()
                fake.num_bytes_sent += len(body if sent is None else sent)

    return Handler


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"#"}
    fake = FakeHub(repos={"acme/tiny": files}, gated={"acme/secret"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    _use_hub(monkeypatch, fake.url, tmp_path / "hub")
    yield fake
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def _use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that nobody answers for."""
    _use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    yield
    huggingface_hub.close_session()


def _ignore(line: str) -> None:
    """A report that nobody reads."""


# ---- paths ------------------------------------------------------------------------------------------------
def test_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    found = resolve_model(ModelConfig(model=str(folder)), _ignore)
    assert (found.path, found.kind, found.name) == (folder, "folder", "tiny")
    gguf = tmp_path / "Tiny-Q4.GGUF"
    gguf.touch()
    found = resolve_model(ModelConfig(model=str(gguf)), _ignore)
    assert (found.path, found.kind, found.name) == (gguf, "gguf", "Tiny-Q4")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(ModelConfig(model="~/m.gguf"), _ignore).path == tmp_path / "m.gguf"


def test_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json \(it holds nothing\)"):
        resolve_model(ModelConfig(model=str(tmp_path)), _ignore)
    for name in ("a.gguf", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"it holds a\.gguf, b\.txt") as error:
        resolve_model(ModelConfig(model=str(tmp_path)), _ignore)
    assert error.value.remedies == (str(tmp_path / "a.gguf"),)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/null", str(pipe)):
        with pytest.raises(ModelNotFound, match=f"{path} is neither a folder nor a file with a model"):
            resolve_model(ModelConfig(model=path), _ignore)
    (tmp_path / "config.json").write_bytes(CONFIG)
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(ModelNotFound, match=r"is a \.safetensors file") as error:
        resolve_model(ModelConfig(model=str(weights)), _ignore)
    assert error.value.remedies == (str(tmp_path),)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "~/nothing", "nothing.gguf", "a/b/c", "org/name/"])
def test_a_path_to_nothing(model: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no file or folder"):
        resolve_model(ModelConfig(model=model), _ignore)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["gpt2", "Why is the sky blue?", "a b/c", "x" * 5000, "org/na\0me", "\udcff"])
def test_neither_path_nor_hub_id(model: str) -> None:
    with pytest.raises(ModelNotFound, match="is neither a file or folder here nor a hub id") as error:
        resolve_model(ModelConfig(model=model), _ignore)
    assert len(error.value.reason) < 200
    assert "headrace models" in error.value.remedies


# ---- the hub ----------------------------------------------------------------------------------------------
def test_download_takes_what_is_needed_and_no_more(fake_hub: FakeHub) -> None:
    fake_hub.repos["acme/tiny"].update(
        {"consolidated.safetensors": b"again", "onnx/model.safetensors": b"x", "pytorch_model.bin": b"p"}
    )
    lines: list[str] = []
    found = resolve_model(ModelConfig(model="acme/tiny"), lines.append)
    assert (found.kind, found.name) == ("folder", "acme/tiny")
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in found.path.iterdir()) == names
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    assert lines == ["downloading acme/tiny: 3 files, 100.0 KiB"]
    # The second time nothing is fetched; nor is anything offline, which finds the same folder.
    fake_hub.sent.clear()
    assert resolve_model(ModelConfig(model="acme/tiny"), lines.append).path == found.path
    assert resolve_model(ModelConfig(model="acme/tiny", offline=True), lines.append).path == found.path
    assert fake_hub.sent == []
    assert len(lines) == 1


def test_modules_of_sentence_transformers_are_fetched(fake_hub: FakeHub) -> None:
    modules = {
        "modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"dense", "2_Dense/pytorch_model.bin": b"dense", "onnx/config.json": b"{}",
    }  # fmt: skip
    fake_hub.repos["acme/tiny"].update(modules)
    found = resolve_config(ModelConfig(model="acme/tiny"), _ignore).path
    assert (found / "1_Pooling/config.json").is_file() and not (found / "2_Dense/model.safetensors").exists()
    found = resolve_model(ModelConfig(model="acme/tiny"), _ignore).path
    assert (found / "2_Dense/model.safetensors").read_bytes() == b"dense"
    assert not (found / "2_Dense/pytorch_model.bin").exists() and not (found / "onnx").exists()


def test_config_alone_fetches_no_weights(fake_hub: FakeHub) -> None:
    found = resolve_config(ModelConfig(model="acme/tiny"), _ignore)
    assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "tokenizer.json"]
    assert "model.safetensors" not in fake_hub.sent
    assert resolve_tokenizer(ModelConfig(model="", tokenizer="acme/tiny"), _ignore) == found.path
    assert resolve_model(ModelConfig(model="acme/tiny", load_format="dummy"), _ignore).path == found.path
    # What is there is no whole model yet, and offline says so.
    with pytest.raises(ModelNotFound, match="cannot be used offline: its weights are not in the cache"):
        resolve_model(ModelConfig(model="acme/tiny", offline=True), _ignore)


def test_weights_that_memory_cannot_hold_are_not_downloaded(fake_hub: FakeHub) -> None:
    with pytest.raises(CapacityError, match=r"weights are 100\.0 KiB, and 1\.0 KiB of memory are free"):
        resolve_model(ModelConfig(model="acme/tiny"), _ignore, memory_bytes=1024)
    assert fake_hub.sent == []


def test_a_full_disk_is_noticed_before_the_download(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.cache.shutil.disk_usage", lambda path: SimpleNamespace(free=10 << 10))
    with pytest.raises(CapacityError, match=r"downloading acme/tiny needs 100\.0 KiB .* 10\.0 KiB are free") as error:
        resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    assert any("HF_HOME" in remedy for remedy in error.value.remedies)
    assert fake_hub.sent == []


def test_a_disk_that_fills_during_the_download(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fill)
    with pytest.raises(CapacityError, match="is full") as error:
        resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    assert error.value.exit_code == 4
    monkeypatch.undo()


def test_pickle_weights_are_refused_unless_allowed(fake_hub: FakeHub) -> None:
    fake_hub.repos["acme/old"] = {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}
    with pytest.raises(ModelNotFound, match=r"only pickle weights \(pytorch_model\.bin\)"):
        resolve_model(ModelConfig(model="acme/old"), _ignore)
    found = resolve_model(ModelConfig(model="acme/old", allow_pickle=True), _ignore)
    assert (found.path / "pytorch_model.bin").read_bytes() == b"pickle"


def test_repositories_without_a_usable_model(fake_hub: FakeHub) -> None:
    fake_hub.repos["acme/gguf"] = {"tiny.Q4_0.gguf": b"GGUF"}
    fake_hub.repos["acme/bare"] = {"config.json": CONFIG}
    with pytest.raises(
        ModelNotFound, match=r"has no config\.json on the hub; it holds GGUF files \(tiny\.Q4_0\.gguf"
    ):
        resolve_model(ModelConfig(model="acme/gguf"), _ignore)
    with pytest.raises(ModelNotFound, match="acme/bare has no weights"):
        resolve_model(ModelConfig(model="acme/bare"), _ignore)


def test_the_hub_says_no(fake_hub: FakeHub) -> None:
    resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    with pytest.raises(ModelNotFound, match="has no model acme/tyni, or it is private; did you mean acme/tiny"):
        resolve_model(ModelConfig(model="acme/tyni"), _ignore)
    with pytest.raises(ModelNotFound, match="acme/secret is gated"):
        resolve_model(ModelConfig(model="acme/secret"), _ignore)
    with pytest.raises(ModelNotFound, match="acme/tiny has no such revision"):
        resolve_model(ModelConfig(model="acme/tiny", revision="v9"), _ignore)


def test_the_cache_serves_when_the_hub_is_out_of_reach(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    lines: list[str] = []
    assert resolve_model(ModelConfig(model="acme/tiny"), lines.append).path == found.path
    assert "cannot reach the hub for acme/tiny" in lines[0]
    assert "using the copy in the cache" in lines[0]


@pytest.mark.usefixtures("no_hub")
def test_no_hub_and_no_copy() -> None:
    with pytest.raises(ModelNotFound, match="cannot reach the hub for acme/tiny: ") as error:
        resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    assert error.value.exit_code == 3
    with pytest.raises(ModelNotFound, match="cannot be used offline: it is not in the cache"):
        resolve_model(ModelConfig(model="acme/tiny", offline=True), _ignore)


def test_a_snapshot_that_lacks_a_shard_is_not_complete(fake_hub: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "m-1.safetensors": b"1"}
    fake_hub.repos["acme/split"] = {**files, "m-2.safetensors": b"2"}
    folder = resolve_model(ModelConfig(model="acme/split"), _ignore).path
    (folder / "m-2.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="1 of its 2 weight files are not in the cache"):
        resolve_model(ModelConfig(model="acme/split", offline=True), _ignore)
    resolve_model(ModelConfig(model="acme/split"), _ignore)
    assert (folder / "m-2.safetensors").read_bytes() == b"2"


def test_the_default_model_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_hub: FakeHub
) -> None:
    monkeypatch.setattr(hub, "find_default_model", lambda: tmp_path / "default.gguf")
    monkeypatch.setattr(hub, "fetch_default_model", lambda **options: tmp_path / "default.gguf")
    monkeypatch.chdir(tmp_path)
    for resolve in (resolve_model, resolve_config):
        short, none = (resolve(ModelConfig(model=name), _ignore) for name in ("SmolLM2-135M-Instruct", ""))
        assert short == none and short.path == tmp_path / "default.gguf"
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "SmolLM2-135M-Instruct" / "config.json").write_text("{}")
    assert resolve_model(ModelConfig(model="SmolLM2-135M-Instruct"), _ignore).kind == "folder"


def test_cached_models_lists_whole_and_partial_ones(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_default_model", lambda: None)
    fake_hub.repos["acme/part"] = dict(fake_hub.repos["acme/tiny"])
    resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    resolve_config(ModelConfig(model="acme/part"), _ignore)
    listed = {cached.model.name: cached for cached in hub.cached_models()}
    assert listed["acme/tiny"].missing == ""
    assert listed["acme/tiny"].num_bytes >= len(WEIGHTS)
    assert listed["acme/part"].missing == "its weights are not in the cache"


@pytest.mark.parametrize("sizes_are_known", [True, False])
def test_disk_full_for_real(fake_hub: FakeHub, tmp_path: Path, sizes_are_known: bool) -> None:
    """The command on a file system too small for the weights: exit code 4 and a clear line.

    If the hub tells no sizes, the disk fills in the middle of the file.
    """
    fake_hub.tells_sizes = sizes_are_known
    small = tmp_path / "small"
    small.mkdir()
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {small} && mkdir {small}/x && "
        f"exec {sys.executable} -c 'from headrace.core.cli import main; main()' download acme/tiny"
    )
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no private mounts")
    environ = {**os.environ, "HF_ENDPOINT": fake_hub.url, "HF_HOME": str(small / "x")}
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, env=environ)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-2:]
    assert "downloading acme/tiny needs 100.0 KiB" in last[0] if sizes_are_known else "is full" in last[0]
    assert last[1].startswith("  try: free some space")
    assert "Traceback" not in done.stderr


def test_interrupted_download_ends_at_once_and_is_resumed(fake_hub: FakeHub, tmp_path: Path) -> None:
    """Ctrl-C in the middle of the weights; the next run asks only for the rest."""
    fake_hub.repos["acme/tiny"]["model.safetensors"] = weights = WEIGHTS * 250  # 25 MB: several of the hub's chunks
    fake_hub.stalls = True
    environ = {**os.environ, "HF_ENDPOINT": fake_hub.url, "HF_HOME": str(tmp_path / "home")}
    program = [sys.executable, "-c", "from headrace.core.cli import main; main()", "download", "acme/tiny"]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    deadline_s = time.monotonic() + 20
    while bytes_under(tmp_path, "*.incomplete") < 10 << 20:
        assert time.monotonic() < deadline_s, "the download did not begin"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "error" not in err
    fake_hub.stalls, fake_hub.num_bytes_sent = False, 0
    done = subprocess.run(program, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == weights
    assert fake_hub.num_bytes_sent < len(weights) * 0.65


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_arrives_damaged_is_not_kept(fake_hub: FakeHub, name: str) -> None:
    right = fake_hub.repos["acme/tiny"][name]
    fake_hub.damaged[name] = right[:-1] + b"X"
    with pytest.raises(ModelError, match=f"acme/tiny/{name} arrived damaged"):
        resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    fake_hub.damaged.clear()
    found = resolve_model(ModelConfig(model="acme/tiny"), _ignore)
    assert (found.path / name).read_bytes() == right
