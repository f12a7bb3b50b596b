"""Packages that are not installed: one message that names the extra, wherever they are missed."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import MissingPackage
from headrace.core.extras import EXTRAS, extra_remedy, missing_package
from live_server import LiveServer
from tiny_server_model import tiny_server_model
from vision_cases import data_url, make_chat_model, picture

ROOT = Path(__file__).parents[2]


def without(folder: Path, *modules: str) -> dict[str, str]:
    """An environment whose Pythons do not find these modules."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nfor name in {modules!r}:\n    sys.modules[name] = None\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def failed_import(name: str) -> ImportError:
    with pytest.raises(ImportError) as caught:
        __import__(name)
    return caught.value


def test_the_table_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, (name, extra) in EXTRAS.items():
        found = [re.split(r"[\[>=-]", line)[0].lower() for line in extras[extra]]
        assert name.lower() in found, module


def test_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in EXTRAS:
        monkeypatch.setitem(sys.modules, module, None)
        for name in (module, f"{module}.deeper"):
            missing = missing_package(failed_import(name), "a picture")
            assert (
                missing is not None
                and missing.reason == f"a picture needs {EXTRAS[module][0]}, which is not installed"
            )
            assert missing.remedies == (extra_remedy(module),)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    missing = missing_package(failed_import("jinja2"))
    assert missing is not None and "needs it always" in missing.remedies[0]
    missing = missing_package(failed_import("no_such_module_at_all"))
    assert missing is not None and missing.remedies == (
        "install the package that has the module no_such_module_at_all",
    )
    broken = missing_package(ImportError("cannot import name 'Tensor' from 'torch'", name="torch"))
    assert broken is not None and "cannot be imported: cannot import name" in broken.reason


def test_what_came_of_a_failed_import() -> None:
    try:
        try:
            raise failed_import("no_such_module_at_all")
        except ImportError as error:
            raise RuntimeError("lost") from error
    except RuntimeError as error:
        assert missing_package(error) is not None
    assert missing_package(RuntimeError("nothing of the kind")) is None
    assert missing_package(failed_import("headrace.no_such_module")) is None  # a fault of our own


@pytest.mark.parametrize("module", ["PIL", "transformers"])
def test_a_server_without_what_reads_images(tmp_path: Path, module: str) -> None:
    folder = tmp_path / "llava"
    make_chat_model(folder)
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
        {"type": "text", "text": "What is it?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    options = ["--threads", "1", "--kv-memory", "16MiB"]
    with LiveServer(folder, *options, device="cpu", env=without(tmp_path / "site", module)) as server:
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 501
        error = answer.json()["error"]
        wanted = f"reading images needs {EXTRAS[module][0]}, which is not installed (try: {extra_remedy(module)})"
        assert (error["message"], error["code"]) == (wanted, "package_not_installed")
        blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]
        said = server.post("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": blocks}]})
        assert said.status_code == 501 or module == "transformers"  # which is missed once Pillow has read the image
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


def test_on_the_cpu_without_torch_a_model_reads_text_alone(tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    make_chat_model(folder)
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(1))}}]
    options = ["--threads", "1", "--kv-memory", "16MiB"]
    with LiveServer(folder, *options, device="cpu", env=without(tmp_path / "site", "torch")) as server:
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        said = server.post("/v1/chat/completions", body).json()["error"]["message"]
        assert said.endswith(f"reads no images here (try: {extra_remedy('torch')})")
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tiny_server_model(tmp_path_factory.mktemp("served") / "tiny")


def test_a_route_that_nobody_thought_of(tmp_path: Path, model: Path) -> None:
    with LiveServer(model, env=without(tmp_path / "site", "prometheus_client")) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        import httpx

        said = httpx.get(f"{server.url}/metrics")
        assert said.status_code == 501 and "needs prometheus_client, which is not installed" in said.text


@pytest.mark.parametrize("command", ["serve", "complete"])
@pytest.mark.parametrize("module", ["tokenizers", "jinja2"])
def test_commands_say_it_in_a_line(tmp_path: Path, model: Path, command: str, module: str) -> None:
    program = [sys.executable, "-c", "from headrace.core.cli import main; main()"]
    arguments = [command, str(model), *(["x"] if command == "complete" else ["--port", "0"])]
    options = ["--device", "null", "--load-format", "dummy", "--kv-memory", "8MiB"]
    environment: dict[str, Any] = {**os.environ, **without(tmp_path / "site", module)}
    done = subprocess.run(
        [*program, *arguments, *options], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == MissingPackage.exit_code, done.stderr
    assert f"needs {module}, which is not installed\n  try: pip install --force-reinstall" in done.stderr
    assert "Traceback" not in done.stderr
