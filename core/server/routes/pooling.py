"""/v1/embeddings, /v1/score, /v1/rerank and /v1/classify, for models that make vectors; 404 with others."""

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ...pooling.params import PoolingParams
from ...pooling.tasks import PoolingRequest, Task, TextInput
from ...stages import FloatArray
from ..api_errors import ApiError, ClientGone
from ..generation import Generation
from ..http import JsonResponse, read_json, watched
from ..protocol.common import new_id, now
from ..protocol.pooling import (
    Classified,
    ClassifyRequest,
    ClassifyResponse,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingFields,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from .text import collected, usage

if TYPE_CHECKING:
    from ..server import Server

_SHORT_CHARS = 4000


async def embeddings(request: Request) -> Response:
    """The embedding of each text."""
    run = await _begin(request, EmbeddingRequest, "embed")
    body = run.body
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt_name=body.prompt_name,
    )
    given: Any = body.input
    if isinstance(given, str) or (given and all(type(item) is int for item in given)):
        given = [given]
    texts = [{"prompt_token_ids": item} if isinstance(item, list) else item for item in given]
    requests = await run.prepare(texts, params)
    vectors = await run.vectors(requests)
    data = []
    for index, (each, vector) in enumerate(zip(requests, vectors, strict=True)):
        values = run.server.pooling.embedding(each, vector, params).embedding
        data.append(Embedding(index=index, embedding=_encoded(values, body.encoding_format or "float")))
    return run.answer(EmbeddingResponse(data=data, model=run.model, usage=usage(run.generation)))


async def score(request: Request) -> Response:
    """How well each pair of texts fits."""
    run = await _begin(request, ScoreRequest, "score")
    firsts, seconds = _as_list(run.body.text_1), _as_list(run.body.text_2)
    scores = await run.scores(firsts, seconds)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    answer = ScoreResponse(id=run.id, created=now(), model=run.model, data=data, usage=usage(run.generation))
    return run.answer(answer)


async def rerank(request: Request) -> Response:
    """The documents in the order of how well they fit the query."""
    run = await _begin(request, RerankRequest, "score")
    body = run.body
    texts = [document if isinstance(document, str) else document.get("text") for document in body.documents]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("documents must be texts or objects with a text", code="invalid_request")
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n must be 0 (all) or more, got {body.top_n}", code="invalid_request")
    scores = await run.scores([body.query], [str(text) for text in texts])
    ranked = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        RankedDocument(
            index=index,
            relevance_score=scores[index],
            document={"text": texts[index]} if body.return_documents else None,
        )
        for index in ranked
    ]
    return run.answer(RerankResponse(id=run.id, model=run.model, results=results, usage=usage(run.generation)))


async def classify(request: Request) -> Response:
    """The label of each text, with the scores of all labels."""
    run = await _begin(request, ClassifyRequest, "classify")
    params = PoolingParams(
        use_activation=run.body.use_activation is not False, truncate_prompt_tokens=run.body.truncate_prompt_tokens
    )
    requests = await run.prepare(_as_list(run.body.input), params)
    data = []
    for index, (each, vector) in enumerate(zip(requests, await run.vectors(requests), strict=True)):
        found = run.server.pooling.classes(each, vector, params)
        data.append(Classified(index=index, label=found.label, probs=found.probs, num_classes=found.num_classes))
    answer = ClassifyResponse(id=run.id, created=now(), model=run.model, data=data, usage=usage(run.generation))
    return run.answer(answer)


async def _begin(request: Request, kind: type[Any], task: Task) -> "_Run":
    """Read the body. Raises ApiError 404 for a model that cannot do the task."""
    server: Server = request.app.state.server
    server.check_model(None)
    try:
        server.pooling.require(task)
    except RequestError as error:
        raise ApiError(404, f"{request.url.path}: {error.reason}", code="unsupported_by_model") from None
    body = await read_json(request, kind, server.config.server.max_body_bytes)
    server.check_model(body.model)
    return _Run(server, request, body, new_id(f"{task}-"))


class _Run:
    """One request for vectors. body: of the route's own type."""

    generation: Generation

    def __init__(self, server: "Server", request: Request, body: Any, run_id: str) -> None:
        self.server = server
        self.body = body
        self.id = run_id
        self.model = body.model or server.model_name
        self._request = request

    async def prepare(self, texts: Sequence[TextInput], params: PoolingParams) -> list[PoolingRequest]:
        """Tokens of all texts, made in a thread if that takes long. Raises RequestError."""
        if not texts:
            raise RequestError("there is no text", code="empty_prompt")
        self.server.check_count(len(texts), "texts")
        if params.truncate_prompt_tokens is None:
            for text in texts:
                for part in text if isinstance(text, tuple) else (text,):
                    if isinstance(part, str):
                        self.server.prompts.check_length(part)
        tasks = self.server.pooling
        size = sum(len(text) if isinstance(text, str) else 100 for text in texts)
        return await self.server.prompts.run(
            lambda: [tasks.prepare(text, params) for text in texts], is_short=size <= _SHORT_CHARS
        )

    async def vectors(self, requests: Sequence[PoolingRequest]) -> list[FloatArray]:
        """The vector of each. Raises ApiError or ClientGone."""
        fields: PoolingFields = self.body
        engine = self.server.engine
        self.generation = generation = self.server.submit_pooling(
            self._request, self.id, requests, priority=fields.priority or 0
        )
        try:
            async with watched(self._request, lambda: engine.cancel(generation, ClientGone())):
                outputs = await collected(generation)
        except ApiError as error:
            engine.cancel(generation, error)
            raise
        return [np.frombuffer(output.pooled or b"", np.float32) for output in outputs]

    async def scores(self, firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        """A score for each of the second texts, with its own first one or the only one."""
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"{len(firsts)} texts do not go with {len(seconds)}: give one, or as many", code="invalid_request"
            )
        if not seconds:
            raise RequestError("there is no text", code="empty_prompt")
        tasks, params = self.server.pooling, PoolingParams(truncate_prompt_tokens=self.body.truncate_prompt_tokens)
        if tasks.reads_pairs:
            pairs = [(firsts[i % len(firsts)], text) for i, text in enumerate(seconds)]
            requests = await self.prepare(pairs, params)
            vectors = await self.vectors(requests)
            return [
                tasks.pair_score(each, vector, params).score for each, vector in zip(requests, vectors, strict=True)
            ]
        requests = await self.prepare([*firsts, *seconds], params)
        vectors = await self.vectors(requests)
        made = [tasks.embedding(each, vector, params) for each, vector in zip(requests, vectors, strict=True)]
        first, second = made[: len(firsts)], made[len(firsts) :]
        return [tasks.similarity(first[i % len(first)], each).score for i, each in enumerate(second)]

    def answer(self, value: Any) -> Response:
        """The response."""
        return JsonResponse(value, headers={"x-request-id": self.generation.id})


def _encoded(values: FloatArray, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode("ascii")
    numbers: list[float] = values.tolist()
    return numbers


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
