"""Every family against transformers: tiny random checkpoints, read from files, logits compared in float32."""

from pathlib import Path

import pytest
import torch

from golden_cases import FIRST as CASES
from paged_model import (
    TOLERANCE,
    Case,
    check_logits,
    load_folder,
    make_checkpoint,
    make_sequences,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma3_text_two_ropes", "gpt2"])
def test_a_changed_weight_changes_the_logits(name: str, tmp_path: Path) -> None:
    """The comparison can fail: any parameter whose values are off by a few percent is seen."""
    case = next(case for case in CASES if case.name == name)
    model = load_folder(make_checkpoint(case, tmp_path))
    ids = make_sequences(case)[0]
    before = model.logits([ids], block_size=64)[0]
    generator = torch.Generator().manual_seed(11)
    for param, value in model.params.items():
        original = value.clone()
        value.mul_(1 + 0.05 * torch.randn(value.shape, generator=generator))
        after = model.logits([ids], block_size=64)[0]
        value.copy_(original)
        assert ((after - before).abs().max() / before.std()).item() > TOLERANCE, param
