"""Every other family against transformers: one case each in the default run, all flags in the full one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from golden_cases import CASES, FLAGS
from paged_model import Case, check_logits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a shared machine made a forward pass a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_of_a_family(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path, thoroughly=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + FLAGS, ids=lambda case: case.name)
def test_logits_with_every_flag(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path)
