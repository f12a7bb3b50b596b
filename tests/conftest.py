"""Settings for the whole suite: one thread for torch, hypothesis profiles, and a run without torch."""

import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

HEAVY = {"torch", "transformers", "safetensors", "accelerate"}
SUPPORT = Path(__file__).parent / "support"

hypothesis.settings.register_profile(
    "ci", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--no-torch leaves out the modules that import torch or transformers, for Pythons without them."""
    parser.addoption("--no-torch", action="store_true", help="leave out the tests that need torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a module out if it needs a library that this run does without."""
    if not config.getoption("--no-torch") or collection_path.suffix != ".py":
        return None
    return True if needs_torch(collection_path) else None


@functools.cache
def needs_torch(path: Path) -> bool:
    """True if a module imports torch or the like, itself or through tests/support."""
    names = set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return bool(names & HEAVY) or any(needs_torch(file) for file in SUPPORT.glob("*.py") if file.stem in names)


def pytest_configure(config: pytest.Config) -> None:
    """Golden tests on a shared machine run several times faster with one thread; Triton's kernels are interpreted, as
    it reads when it is imported, which transformers does, too."""
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("torch") is not None and not config.getoption("--no-torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads on a shared machine made a forward pass of torch a hundred times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
