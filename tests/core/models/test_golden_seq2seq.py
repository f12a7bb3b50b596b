"""Every encoder-decoder family against transformers: tiny random checkpoints, read from files, logits in float32."""

from pathlib import Path

import pytest

from paged_seq2seq import SEQ2SEQ_CASES, Seq2SeqCase, check_seq2seq

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", SEQ2SEQ_CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: Seq2SeqCase, tmp_path: Path) -> None:
    assert check_seq2seq(case, tmp_path) < 2e-4
