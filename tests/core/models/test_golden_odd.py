"""Odd configurations of many families against transformers: a sample in the default run, all in the full one."""

from pathlib import Path

import pytest

from odd_cases import ODD_CASES, QUICK
from paged_model import Case, check_logits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),  # of experts of size 0
]


def test_the_sample_is_of_the_table() -> None:
    names = [case.name for case in ODD_CASES]
    assert set(QUICK) <= set(names) and len(names) == len(set(names))


@pytest.mark.parametrize("case", [case for case in ODD_CASES if case.name in QUICK], ids=lambda case: case.name)
def test_a_sample(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path, thoroughly=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: case.name)
def test_all(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path, thoroughly=False)
