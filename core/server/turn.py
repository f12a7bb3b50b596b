"""The assistant's next turn of a conversation, whatever protocol asks for it: prompt, parameters, how it is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ..errors import RequestError
from ..sampling.params import SamplingParams
from ..sampling.validate import MAX_LOGPROBS
from ..stages import ImageInput
from ..vision.images import take_images
from .chat_parser import ChatForm, TurnParser, chat_form, narrow_tools, with_parsed_arguments
from .frames import Output
from .generation import Generation
from .prompts import last_tokens
from .protocol.chat import ChatRequest
from .protocol.common import sampling_params
from .protocol.completions import FinishReason
from .structure import structured_output

if TYPE_CHECKING:
    from .server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request for one turn (n of them), ready for the engine. Chat's request is what other protocols become."""

    request: ChatRequest
    form: ChatForm
    prompt: str
    token_ids: list[int]
    params: SamplingParams
    images: Sequence[ImageInput] = ()

    def new_parser(self) -> TurnParser:
        """A parser for one answer."""
        return self.form.new_parser(self.prompt)


async def read_turn(server: "Server", body: ChatRequest) -> Turn:
    """The turn that a request asks for. Raises RequestError."""
    narrow_tools(body)
    form = chat_form(body, server.format, server.prompts.tokenizer)
    prompt, token_ids, images = await render_with_images(server, body, body.messages)
    if body.truncate_prompt_tokens is not None:
        if images:
            reason = "truncate_prompt_tokens: a prompt with images cannot be cut"
            raise RequestError(reason, code="unsupported_parameter")
        token_ids = last_tokens(
            token_ids, body.truncate_prompt_tokens, server.limits.max_model_len, _max_tokens(body)
        )
    params = sampling_params(body, server.defaults, **_params(body, form, prompt))
    return Turn(request=body, form=form, prompt=prompt, token_ids=token_ids, params=params, images=images)


async def render_turn(
    server: "Server", body: ChatRequest, messages: Sequence[dict[str, Any]]
) -> tuple[str, list[int]]:
    """The prompt for these messages, with the request's other fields, as text and token ids. Raises RequestError."""
    prompt, token_ids, _ = await render_with_images(server, body, messages)
    return prompt, token_ids


async def render_with_images(
    server: "Server", body: ChatRequest, messages: Sequence[dict[str, Any]]
) -> tuple[str, list[int], Sequence[ImageInput]]:
    """What `render_turn` gives, and the images at their places in the token ids."""
    server.check_makes_text()
    if server.decoder_start is not None:
        raise RequestError(
            f"{server.model_name} is an encoder-decoder model: it cannot chat",
            code="not_supported",
            remedies=["/v1/completions with a plain prompt"],
        )
    narrow_tools(body)
    plain, sources = take_images(messages)
    if sources:
        if server.limits.vision is None:
            raise RequestError(f"{server.model_name} reads no images", code="not_supported")
        server.prompts.image_reader()
    prompt = await server.prompts.render(with_parsed_arguments(plain), **_template_options(body))
    has_ends = bool(body.add_special_tokens)
    if not sources:
        return prompt, await server.prompts.encode(prompt, add_special_tokens=has_ends), ()
    token_ids, images = await server.prompts.with_images(prompt, sources, add_special_tokens=has_ends)
    return prompt, token_ids, images


async def fit_turn(server: "Server", body: ChatRequest) -> list[dict[str, Any]]:
    """The messages without the oldest turns, as many as make the prompt too long. The system message stays, and so
    does the last turn, even if it is too long alone."""
    limit = server.limits.max_model_len
    room = limit - min(body.max_completion_tokens or 1, limit // 2)
    messages = body.messages
    starts = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    first = next((i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer")), 0)
    if not starts:
        return messages

    async def fits(start: int) -> bool:
        if first + len(messages) - start > server.prompts.max_messages:
            return False
        return len((await render_turn(server, body, messages[:first] + messages[start:]))[1]) <= room

    if await fits(first):
        return messages
    low, high = 0, len(starts) - 1  # the first turn that may stay is one of these
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return messages[:first] + messages[starts[low] :]


async def submit_turn(server: "Server", request: Request, generation_id: str, turn: Turn) -> Generation:
    """Hand a turn to the engine. Raises RequestError or ApiError."""
    return await server.submit(
        request,
        generation_id,
        [turn.token_ids],
        turn.params,
        priority=turn.request.priority or 0,
        cache_salt=turn.request.cache_salt or "",
        images=turn.images,
        lora=server.lora_of(turn.request.model),
    )


def finish_reason(parser: TurnParser, output: Output) -> FinishReason | None:
    """An answer that ends with calls ends for them; one that was cut off was cut off."""
    return "tool_calls" if parser.num_calls and output.finish_reason == "stop" else output.finish_reason


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            options["enable_thinking"] = False  # what most templates of models that think call it
    options.update(body.chat_template_kwargs or {})
    for name in ("template", "image_placeholder"):
        if name in options:
            raise RequestError(f"chat_template_kwargs: {name} is nothing that a request may set")
    for name in ("messages", "tools", "documents"):
        options.pop(name, None)
    for name in ("continue_final_message", "add_generation_prompt"):
        if (given := getattr(body, name)) is not None and not (given is False and name in options):
            options[name] = given
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    if body.documents:
        options["documents"] = body.documents
    return options


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: ChatRequest, form: ChatForm, prompt: str) -> dict[str, Any]:
    wanted = body.top_logprobs or 0
    if wanted and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", code="invalid_sampling_params")
    if not 0 <= wanted <= MAX_LOGPROBS:
        reason = f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {wanted}"
        raise RequestError(reason, code="invalid_sampling_params")
    fixed: dict[str, Any] = {
        "max_tokens": _max_tokens(body),
        "structured_output": form.structured_output(structured_output(body), prompt),
    }
    if form.needs_special_tokens:
        fixed["skip_special_tokens"] = False
    if body.logprobs:
        fixed["logprobs"] = wanted
    return fixed
