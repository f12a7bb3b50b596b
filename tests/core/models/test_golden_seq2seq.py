"""Every encoder-decoder family against transformers: tiny random checkpoints, read from files, logits in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged_seq2seq import SEQ2SEQ_CASES, Seq2SeqCase, check_seq2seq


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a shared machine made a forward pass a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", SEQ2SEQ_CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: Seq2SeqCase, tmp_path: Path) -> None:
    assert check_seq2seq(case, tmp_path) < 2e-4
