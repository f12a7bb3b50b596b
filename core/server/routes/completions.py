"""/v1/completions, with echo, batches, token ids and log probabilities as evaluation harnesses need them."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ...stages import EncoderInput
from ...text.infill import infill_marks, infill_prompt
from ..frames import Output, TokenEntries
from ..generation import Generation
from ..http import read_json
from ..logprobs import LegacyLogprobs, extend, prompt_logprobs
from ..prompts import last_tokens
from ..protocol.common import new_id, now, refuse, sampling_params
from ..protocol.completions import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from ..request_log import timings
from ..structure import structured_output
from .text import answer_once, answer_stream, check_output, usage, usage_of_chunk, wants_usage

if TYPE_CHECKING:
    from ..server import Server


async def completions(request: Request) -> Response:
    """Continue one prompt or several, at once or as a stream."""
    server: Server = request.app.state.server
    body = await read_json(request, CompletionRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, {})
    _check_best_of(body)
    prompts = await _prompts(server, body)
    if body.suffix:
        prompts = [await _infill(server, body, *prompt) for prompt in prompts]
    encoders: list[EncoderInput | None] = []
    if server.decoder_start is not None:  # then the texts are what the encoder reads
        encoders = [EncoderInput(token_ids=token_ids) for _, token_ids in prompts]
        prompts = [(text, server.decoder_start.token_ids()) for text, _ in prompts]
    params = sampling_params(body, server.defaults, **_params(body))
    answer = _Answer(server, body, prompts)
    generation = await server.submit(
        request,
        answer.id,
        [token_ids for _, token_ids in prompts],
        params,
        encoders=encoders,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        lora=server.lora_of(body.model),
    )
    if body.stream:
        return await answer_stream(server, request, generation, answer.chunks(generation))
    return await answer_once(server, request, generation, lambda outputs: answer.whole(generation, outputs))


async def _prompts(server: "Server", body: CompletionRequest) -> list[tuple[str | None, list[int]]]:
    """Text (None for token ids) and token ids of each prompt. Raises RequestError."""
    given: Any = body.prompt
    if given is None:
        raise RequestError("prompt is missing", code="empty_prompt")
    if isinstance(given, str) or (given and type(given[0]) is int):
        given = [given]
    if not given:
        raise RequestError("the prompt is empty: there is no token to start from", code="empty_prompt")
    server.check_count(len(given), "completions")

    def cut(token_ids: list[int]) -> list[int]:
        return last_tokens(token_ids, body.truncate_prompt_tokens, server.limits.max_model_len, body.max_tokens)

    given = [cut(prompt) if isinstance(prompt, list) else prompt for prompt in given]
    for prompt in given:
        if not isinstance(prompt, str) and not _are_token_ids(prompt, server.limits.max_model_len):
            raise RequestError(
                "prompt must be a text, a list of texts, a list of token ids or a list of such lists",
                code="invalid_prompt",
            )
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoded = iter(await server.prompts.encode_all(texts, add_special_tokens=body.add_special_tokens is not False))
    found: list[tuple[str | None, list[int]]] = []
    for prompt in given:
        if not isinstance(prompt, str):
            found.append((None, prompt))
            continue
        token_ids = next(encoded)
        kept = cut(token_ids)
        found.append((prompt if len(kept) == len(token_ids) else None, kept))
    return found


def _are_token_ids(prompt: Any, max_model_len: int) -> bool:
    """True also for a list that is too long, which is refused for that before anybody looks at its items."""
    return isinstance(prompt, list) and (len(prompt) > max_model_len or all(type(item) is int for item in prompt))


async def _infill(
    server: "Server", body: CompletionRequest, text: str | None, token_ids: list[int]
) -> tuple[str | None, list[int]]:
    """A prompt that asks for what stands between it and the suffix. Raises RequestError."""
    tokenizer = server.prompts.tokenizer
    marks = infill_marks(tokenizer)
    if marks is None or server.decoder_start is not None:
        raise RequestError(
            f"suffix: {server.model_name} cannot fill in the middle: its tokenizer has no tokens for that",
            code="unsupported_parameter",
        )
    if text is None or body.echo:
        raise RequestError(
            "suffix: goes with a prompt that is a text, and without echo", code="unsupported_parameter"
        )
    after = await server.prompts.encode(body.suffix or "", add_special_tokens=False)
    num_first = next((n for n, token in enumerate(token_ids) if token not in tokenizer.special_ids), len(token_ids))
    return text, infill_prompt(marks, token_ids, after, num_first)


def _check_best_of(body: CompletionRequest) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise RequestError(f"best_of must be at least n, got {body.best_of} for {n}", code="invalid_sampling_params")
    if body.best_of not in (None, n) and body.stream:
        raise RequestError("best_of: the best are known at the end; do without stream", code="unsupported_parameter")


def _params(body: CompletionRequest) -> dict[str, Any]:
    fixed: dict[str, Any] = {"max_tokens": body.max_tokens, "structured_output": structured_output(body)}
    if body.best_of is not None:
        fixed["n"] = body.best_of
        if body.best_of > (body.n or 1):
            fixed["logprobs"] = 0
    if body.logprobs is not None:
        fixed["logprobs"] = body.logprobs
        if body.echo:
            fixed["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return fixed


def _best(outputs: list[Output], best_of: int, n: int) -> list[Output]:
    """Of each prompt's outputs the n that are most likely, by the mean log probability of their tokens."""

    def mean_logprob(output: Output) -> float:
        values = [entries[0].logprob for entries in output.logprobs or ()]
        return sum(values) / len(values) if values else 0.0

    groups = [outputs[start : start + best_of] for start in range(0, len(outputs), best_of)]
    return [output for group in groups for output in sorted(group, key=mean_logprob, reverse=True)[:n]]


class _Answer:
    """Makes the answers of one request, whole or in chunks."""

    def __init__(
        self, server: "Server", body: CompletionRequest, prompts: list[tuple[str | None, list[int]]]
    ) -> None:
        self.id = new_id("cmpl-")
        self._created = now()
        self._model = body.model or server.model_name
        self._body = body
        self._server = server
        self._prompts = prompts
        self._n = body.n or 1
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self._has_begun: set[int] = set()

    def whole(self, generation: Generation, outputs: list[Output]) -> CompletionResponse:
        """The response that is no stream."""
        if self._body.best_of is not None:
            outputs = _best(outputs, self._body.best_of, self._n)
        return CompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=usage(generation),
            timings=timings(generation),
        )

    async def chunks(self, generation: Generation) -> AsyncIterator[CompletionResponse]:
        """The events of a stream."""
        while changes := await generation.changes():
            for index, output in changes:
                check_output(output)
                choice = self._choice(index, output)
                if (
                    choice.text
                    or choice.logprobs
                    or choice.token_ids
                    or choice.prompt_logprobs
                    or output.finish_reason
                ):
                    yield self._chunk(generation, choice)
        if wants_usage(self._body):
            last = self._chunk(generation)
            last.usage, last.timings = usage(generation), timings(generation)
            yield last

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        """What is new of a completion; the first time with the prompt, if it is to be echoed."""
        body = self._body
        text, token_ids = self._prompts[index // self._n]
        logprobs: CompletionLogprobs | None = None
        is_first = index not in self._has_begun
        self._has_begun.add(index)
        echoed = ""
        if is_first and body.echo:
            echoed = self._prompt_text(text, token_ids)
            if body.logprobs is not None:
                logprobs = self._push(index, output.prompt_logprobs or [None] * len(token_ids), token_ids)
        if output.logprobs is not None and body.logprobs is not None:
            logprobs = extend(logprobs, self._push(index, output.logprobs, output.token_ids))
        wants_prompt = is_first and body.prompt_logprobs is not None and output.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=echoed + output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs or []) if wants_prompt else None,
            prompt_token_ids=token_ids if is_first and body.return_token_ids else None,
            token_ids=output.token_ids if body.return_token_ids else None,
        )

    def _push(
        self, index: int, positions: "Sequence[TokenEntries | None]", token_ids: Sequence[int]
    ) -> CompletionLogprobs:
        prompts = self._server.prompts
        tokenizer = prompts.tokenizer if prompts.has_tokenizer else None
        if index not in self._logprobs:
            offset = 0
            if not self._body.echo:
                text, prompt_ids = self._prompts[index // self._n]
                offset = len(self._prompt_text(text, prompt_ids))
            is_skipped = self._body.skip_special_tokens is not False and tokenizer is not None
            skipped = tokenizer.special_ids if tokenizer is not None and is_skipped else frozenset()
            self._logprobs[index] = LegacyLogprobs(offset, skipped, by_id=bool(self._body.return_tokens_as_token_ids))
        texts = [tokenizer.token_text(token) if tokenizer is not None else "" for token in token_ids]
        return self._logprobs[index].push(positions, token_ids, texts)

    def _prompt_text(self, text: str | None, token_ids: list[int]) -> str:
        if text is not None:
            return text
        prompts = self._server.prompts
        if not prompts.has_tokenizer:
            return ""
        return prompts.tokenizer.decode(token_ids, skip_special_tokens=self._body.skip_special_tokens is not False)

    def _chunk(self, generation: Generation, *choices: CompletionChoice) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage_of_chunk(self._body, generation),
        )
