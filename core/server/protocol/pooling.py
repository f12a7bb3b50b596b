"""Types of the routes that make vectors: embeddings, scores, ranks, classes."""

from typing import Any, Literal

import msgspec

from .common import Int, Usage


class PoolingFields(msgspec.Struct, kw_only=True):
    """What these routes have in common."""

    model: str | None = None
    user: str | None = None
    priority: Int | None = 0
    truncate_prompt_tokens: Int | None = None
    """cut texts to so many tokens; -1: to what the model takes; null: a longer text is an error"""


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Texts whose embeddings are asked for: a text, token ids, or a list of either."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One embedding: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """All embeddings, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ScoreRequest(PoolingFields, kw_only=True):
    """Pairs to be scored: one text_1 with all of text_2, or as many of each."""

    text_1: str | list[str]
    text_2: str | list[str]


class Score(msgspec.Struct, kw_only=True):
    """How well a pair fits."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """All scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankRequest(PoolingFields, kw_only=True):
    """Documents to be ranked: texts, or objects with a text."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Int | None = None
    return_documents: bool | None = True


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document; index: its place in the request."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage


class ClassifyRequest(PoolingFields, kw_only=True):
    """Texts to be classified."""

    input: str | list[str]
    use_activation: bool | None = True


class Classified(msgspec.Struct, kw_only=True):
    """The best label of a text, and the scores of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """All texts, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: Usage
