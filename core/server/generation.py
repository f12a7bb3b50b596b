"""A request on its way: what was asked, what the engine gave so far, and who waits for it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..stages import EncoderInput, ImageInput
from .api_errors import ApiError, ClientGone
from .frames import Output, merge

Change = tuple[int, Output]
"""Which completion, and what is new of it."""


class Completion:
    """One completion of a request: all that an engine needs to begin it, or to go on with it after a crash."""

    __slots__ = (
        "cache_salt",
        "company",
        "encoder",
        "generation",
        "images",
        "index",
        "is_finished",
        "is_pooling",
        "is_sent",
        "last_token_s",
        "lora",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "suspect_until",
        "token_types",
    )

    def __init__(
        self,
        *,
        generation: "Generation",
        index: int,
        prompt_token_ids: list[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        cache_salt: str = "",
        is_pooling: bool = False,
        token_types: list[int] | None = None,
        encoder: EncoderInput | None = None,
        images: Sequence[ImageInput] = (),
        lora: str = "",
    ) -> None:
        """is_pooling: a vector is asked for; token_types: of a pair of texts; encoder: the other input of an
        encoder-decoder model; images: of the prompt; lora: the name of an adapter."""
        self.encoder = encoder
        self.images = images
        self.lora = lora
        self.generation = generation
        self.index = index
        self.request_id = f"{generation.id}/{index}"
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.priority = priority
        self.cache_salt = cache_salt
        self.is_pooling = is_pooling
        self.token_types = token_types or []
        self.output_token_ids: list[int] = []
        self.is_sent = False
        self.is_finished = False
        self.last_token_s = 0.0
        # Of the quarantine: how many ran beside it when it came back, and how long it stays a suspect.
        self.company = 0
        self.suspect_until = -1


class Generation:
    """One HTTP request's completions. Changes are kept, merged, until they are read: a slow reader costs memory
    for its own text only, and no task.

    Invariant: it is done (`done_s` is set) once, when all completions have finished or it failed.
    """

    def __init__(
        self,
        generation_id: str,
        *,
        key: str,
        on_done: Callable[["Generation"], None],
        route: str = "",
        trace_headers: Mapping[str, str] = {},
    ) -> None:
        """trace_headers: traceparent and tracestate of whoever asked, if it traces."""
        self.id = generation_id
        self.key = key
        self.route = route
        self.trace_headers = trace_headers
        self.completions: list[Completion] = []
        self.arrival_s = time.monotonic()
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.done_s: float | None = None
        self.num_cached_tokens = 0  # of all prompts
        self.num_output_tokens = 0  # of all completions so far
        self.finish_reasons: dict[int, str] = {}
        self.failure: ApiError | ClientGone | None = None
        self._on_done = on_done
        self._cached: dict[int, int] = {}  # tokens of each prompt, by the id of the list
        self._pending: dict[int, Output] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._accepted = 0
        self._at_end: list[Callable[[], None]] = []

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, once all completions are there; those of one prompt share it."""
        prompts = {
            id(one.prompt_token_ids): len(one.prompt_token_ids) + len(one.encoder.token_ids if one.encoder else ())
            for one in self.completions
        }
        return sum(prompts.values())

    @property
    def is_done(self) -> bool:
        """True if nothing more will come."""
        return self.done_s is not None

    async def wait_accepted(self) -> None:
        """Until the engine took all completions that it was sent, or the first change. Raises what went wrong."""
        while not self._is_accepted() and not self._pending and not self.is_done:
            await self._wait()
        if self.failure is not None:
            raise self.failure
        for output in self._pending.values():
            if output.error and output.code:
                raise ApiError(400, output.error, code=output.code)

    async def changes(self) -> Sequence[Change]:
        """What is new since the last call, waiting for it; empty when all has been read. Raises ApiError or
        ClientGone."""
        while not self._pending:
            if self.failure is not None:
                raise self.failure
            if self.is_done:
                return ()
            await self._wait()
        pending, self._pending = self._pending, {}
        return sorted(pending.items())

    # ---- called by the engine's side --------------------------------------------------------------------------
    def accepted(self) -> None:
        """The engine took one completion."""
        self._accepted += 1
        self._wake()

    def push(self, completion: Completion, output: Output, now_s: float) -> None:
        """Take what is new of a completion."""
        if self.is_done:
            return
        self.num_output_tokens += len(output.token_ids)
        if self.scheduled_s is None:
            self.scheduled_s = output.scheduled_s
        if output.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        prompt = id(completion.prompt_token_ids)
        more = output.num_cached_tokens - self._cached.get(prompt, 0)
        if more > 0:
            self._cached[prompt] = output.num_cached_tokens
            self.num_cached_tokens += more
        index = completion.index
        if index in self._pending:
            merge(self._pending[index], output)
        else:
            self._pending[index] = output
        if output.finish_reason is not None:
            self.finish_reasons[index] = output.finish_reason
            if len(self.finish_reasons) == len(self.completions):
                self._done(now_s)
        self._wake()

    def fail(self, failure: ApiError | ClientGone) -> None:
        """End it with an error; what came before can still be read."""
        if not self.is_done:
            self.failure = failure
            self._done(time.monotonic())
            self._wake()

    def on_end(self, action: Callable[[], None]) -> None:
        """Call this when it is done; at once if it is."""
        if self.is_done:
            action()
        else:
            self._at_end.append(action)

    def _done(self, now_s: float) -> None:
        self.done_s = now_s
        for action in self._at_end:
            action()
        self._on_done(self)

    def _is_accepted(self) -> bool:
        return self._accepted >= max(1, sum(completion.is_sent for completion in self.completions))

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
