"""A tiny model, and a server for clients that need nothing else; its steps take a while, as those of a model do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer
from moody_platform import install
from tiny_server_model import tiny_server_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tokenizer and chat template."""
    return tiny_server_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def slow_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with a platform `moody` whose steps take 20 ms."""
    env = install(tmp_path_factory.mktemp("plugins") / "site", step_s=0.02)
    return {**env, "HEADRACE_LOAD_FORMAT": "dummy"}


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[LiveServer]:
    """A server on the null device."""
    with LiveServer(model_folder, "--kv-memory", "64MiB") as running:
        yield running
