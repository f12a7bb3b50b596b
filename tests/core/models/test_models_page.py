"""docs/models.md names every family."""

from pathlib import Path

from headrace.core.models.registry import family_names

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_names_every_family() -> None:
    """`ci/models` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in family_names() if f"| `{name}` |" not in text] == []
