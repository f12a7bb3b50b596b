"""A model folder and one server that tests share; tests of faults start their own."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from headrace import LLM
from live_server import LiveServer
from tiny_server_model import tiny_server_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tokenizer and chat template."""
    return tiny_server_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[LiveServer]:
    """A server on the null device."""
    with LiveServer(model_folder, "--kv-memory", "16MiB") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def random_server(model_folder: Path) -> Iterator[LiveServer]:
    """A server on real arithmetic with random weights: it writes what grammars let."""
    arguments = ["--kv-memory", "64MiB", "--load-format", "dummy", "--threads", "1"]
    with LiveServer(model_folder, *arguments, device="cpu") as running:
        yield running


@pytest.fixture(scope="session")
def random_client(random_server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of it."""
    with openai.OpenAI(base_url=f"{random_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def llm(model_folder: Path) -> Iterator[LLM]:
    """The same model in this process: what the server's answers are compared with."""
    with LLM(str(model_folder), device="null", load_format="dummy", kv_memory="16MiB") as made:
        yield made
