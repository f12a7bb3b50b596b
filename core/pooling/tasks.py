"""From texts to requests for vectors, and from vectors to what users asked for. Knows no engine.

The Python API and the server both use it; they differ only in how they run the requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..errors import RequestError
from ..models.heads import vector_size
from ..models.sentence import SentencePrompts
from ..models.spec import ModelSpec, PoolerSpec
from ..stages import FloatArray
from ..text.inputs import token_ids
from ..text.tokenizer import Tokenizer
from .outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from .params import PoolingParams

Task = Literal["embed", "classify", "score"]
TextInput = str | Mapping[str, Any] | Sequence[Any]
"""Text, {"prompt_token_ids": [...]}, or two texts that are read as one pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One text, or pair of texts, ready for the engine."""

    token_ids: list[int]
    token_types: list[int]
    text: str | None = None


class PoolingTasks:
    """What one model can do with vectors. Immutable; may be used by several threads."""

    def __init__(
        self,
        *,
        name: str,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        prompts: SentencePrompts | None = None,
    ) -> None:
        """name: the model's, for messages."""
        self._name = name
        self._pooler = spec.pooler
        self._size = vector_size(spec)
        self._num_token_types = spec.num_token_types
        self._tokenizer = tokenizer
        self._max_tokens = max_model_len
        self._prompts = prompts or SentencePrompts()

    # ---- what it can do -----------------------------------------------------------------------------------
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that this model serves; none for a model that generates text."""
        if self._pooler is None:
            return ()
        if not self._pooler.labels:
            return ("embed", "score")
        return ("classify", "score") if len(self._pooler.labels) == 1 else ("classify",)

    def require(self, task: Task) -> PoolerSpec:
        """The model's pooler. Raises RequestError with the reason if it cannot do `task`."""
        pooler = self._pooler
        if pooler is not None and task in self.tasks():
            return pooler
        if pooler is None:
            reason = "it generates text"
        elif task == "score":
            reason = (
                f"it sorts texts into {len(pooler.labels)} classes; scores come from embeddings or from one label"
            )
        else:
            reason = "it gives labels" if pooler.labels else "it gives embeddings"
        remedies = ["--pooling last (or mean, cls) makes embeddings with any model"] if pooler is None else []
        raise RequestError(f"{self._name} cannot {task}: {reason}", code="not_supported", remedies=remedies)

    @property
    def reads_pairs(self) -> bool:
        """True if a score comes from query and document read together (a cross-encoder)."""
        return self._pooler is not None and bool(self._pooler.labels)

    # ---- texts to requests --------------------------------------------------------------------------------
    def prepare(self, text: TextInput, params: PoolingParams) -> PoolingRequest:
        """Tokens of one text or pair. Raises RequestError if it is none, is too long, or names an unknown prompt."""
        limit = self._limit(params)
        if isinstance(text, Mapping):
            if "prompt_token_ids" not in text:
                raise RequestError(
                    f"a text is a string or has prompt_token_ids, got the keys {', '.join(map(str, text))}"
                )
            ids = token_ids(text["prompt_token_ids"])[:limit]
            return self._check(PoolingRequest(token_ids=ids, token_types=[]))
        if isinstance(text, str):
            full = self._prompt(params) + text
            ids, types = self._tokens.encode_pair(full, None, max_tokens=limit)
            return self._check(PoolingRequest(token_ids=ids, token_types=types, text=text))
        if not isinstance(text, Sequence) or len(text) != 2:
            raise RequestError("a text is a string, token ids or a pair of two strings")
        ids, types = self._tokens.encode_pair(text[0], text[1], max_tokens=limit)
        return self._check(PoolingRequest(token_ids=ids, token_types=types))

    # ---- vectors to outputs -------------------------------------------------------------------------------
    def embedding(self, request: PoolingRequest, vector: FloatArray, params: PoolingParams) -> EmbeddingOutput:
        """The embedding, cut and normalised as asked for."""
        pooler = self.require("embed")
        if params.dimensions is not None and params.dimensions > self._size:
            raise RequestError(
                f"dimensions {params.dimensions} is more than the {self._size} of {self._name}",
                code="invalid_pooling_params",
            )
        vector = vector[: params.dimensions]
        if pooler.normalize if params.normalize is None else params.normalize:
            vector = unit(vector)
        return EmbeddingOutput(prompt_token_ids=request.token_ids, embedding=vector)

    def classes(self, request: PoolingRequest, vector: FloatArray, params: PoolingParams) -> ClassificationOutput:
        """Scores of all labels."""
        pooler = self.require("classify")
        probs: list[float] = _activate(vector, pooler, params).tolist()
        best = pooler.labels[int(vector.argmax())]
        return ClassificationOutput(prompt_token_ids=request.token_ids, probs=probs, label=best, labels=pooler.labels)

    def pair_score(self, request: PoolingRequest, vector: FloatArray, params: PoolingParams) -> ScoreOutput:
        """The score of a pair that a cross-encoder read."""
        score = _activate(vector, self.require("score"), params)[0]
        return ScoreOutput(prompt_token_ids=request.token_ids, score=float(score))

    def similarity(self, query: EmbeddingOutput, document: EmbeddingOutput) -> ScoreOutput:
        """The cosine of two embeddings."""
        self.require("score")
        cosine = float(unit(query.embedding) @ unit(document.embedding))
        ids = [*query.prompt_token_ids, *document.prompt_token_ids]
        return ScoreOutput(prompt_token_ids=ids, score=cosine)

    # ---- how ----------------------------------------------------------------------------------------------
    @property
    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{self._name} was loaded without a tokenizer, so texts must be given as token ids")
        return self._tokenizer

    def _limit(self, params: PoolingParams) -> int | None:
        if params.truncate_prompt_tokens is None:
            return None
        own = self._pooler.max_tokens if self._pooler is not None else 0
        limit = min(self._max_tokens, own or self._max_tokens)
        return limit if params.truncate_prompt_tokens == -1 else min(params.truncate_prompt_tokens, self._max_tokens)

    def _prompt(self, params: PoolingParams) -> str:
        name = self._prompts.default if params.prompt_name is None else params.prompt_name
        if name and name not in self._prompts.prompts:
            known = ", ".join(self._prompts.prompts) or "none"
            raise RequestError(f"{self._name} has no prompt {name!r}; it has {known}", code="invalid_pooling_params")
        return self._prompts.prompts[name] if name else ""

    def _check(self, request: PoolingRequest) -> PoolingRequest:
        if max(request.token_types, default=0) >= self._num_token_types:  # some tokenizers tell more than models know
            request = replace(request, token_types=[])
        length = len(request.token_ids)
        if length == 0:
            raise RequestError("the text is empty: there is no token to make a vector of", code="empty_prompt")
        if length > self._max_tokens:
            raise RequestError(
                f"the text has {length} tokens, and {self._name} takes {self._max_tokens}",
                code="context_length_exceeded",
                remedies=[
                    "truncate_prompt_tokens=-1 (headrace embed --truncate)",
                    f"a text of at most {self._max_tokens} tokens",
                ],
            )
        return request


def unit(vector: FloatArray) -> FloatArray:
    """The vector divided by its length; zeros stay zeros."""
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    result: FloatArray = (vector / max(float(length), 1e-12)).astype(np.float32)
    return result


def _activate(logits: FloatArray, pooler: PoolerSpec, params: PoolingParams) -> FloatArray:
    if not params.use_activation or pooler.activation == "none":
        return logits
    wide = logits.astype(np.float64)
    if pooler.activation == "sigmoid":
        scores = np.exp(-np.logaddexp(0, -wide))
    else:
        powers = np.exp(wide - wide.max())
        scores = powers / powers.sum()
    result: FloatArray = scores.astype(np.float32)
    return result
