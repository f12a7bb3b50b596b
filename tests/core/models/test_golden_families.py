"""Every other family against transformers: one case each in the default run, all flags in the full one."""

from pathlib import Path

import pytest

from golden_cases import CASES, FLAGS
from paged_model import Case, check_logits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_of_a_family(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path, thoroughly=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + FLAGS, ids=lambda case: case.name)
def test_logits_with_every_flag(case: Case, tmp_path: Path) -> None:
    check_logits(case, tmp_path)
