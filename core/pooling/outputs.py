"""What users get of a vector. `outputs` is the object itself, so that code written for vLLM reads it."""

from dataclasses import dataclass, field
from typing import Self

from ..stages import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """What all have in common."""

    prompt_token_ids: list[int]

    @property
    def outputs(self) -> Self:
        """This object."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput(_Output):
    """The embedding of one text, float32 [n]."""

    embedding: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput(_Output):
    """The scores of one text's labels (probabilities, unless logits were asked for), and the best label."""

    probs: list[float]
    label: str
    labels: tuple[str, ...] = field(repr=False)

    @property
    def num_classes(self) -> int:
        """Labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput(_Output):
    """How well a document fits a query. prompt_token_ids: of the pair, or of query and document in turn."""

    score: float
