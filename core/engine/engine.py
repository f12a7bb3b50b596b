"""The engine: takes requests, steps until they are finished, gives outputs. Knows no device."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..clock import Clock
from ..errors import RequestError
from ..models.spec import ModelSpec, Pooling
from ..models.vision_spec import VisionSpec
from ..runner.crossed import cross_keys
from ..sampling.params import SamplingParams
from ..sampling.validate import ProcessorFactories, validate_params
from ..scheduler.scheduler import Scheduler
from ..stages import CrossSpan, EncoderInput, EngineRequest, ImageInput, Plan, RequestOutput
from ..structured.compiler import GrammarCache
from ..text.bad_words import bad_word_ids
from ..text.tokenizer import Tokenizer
from .adapters import AdapterPlaces
from .executor import Executor
from .loop import StepLoop
from .output import OutputProcessor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a request must keep to."""

    vocab_size: int
    max_model_len: int
    pooling: Pooling | None = None
    """the model makes vectors in this way, and no text"""
    in_one_step: bool = False
    """a prompt must be computed in one step"""
    encoder: ModelSpec | None = None
    """reads another input, which every request brings"""
    vision: VisionSpec | None = None
    """reads images"""
    num_image_blocks: int = 0
    """that the rows of a request's images may take"""
    block_size: int = 1


class Engine:
    """Owns the scheduler, the executor and the outputs. One thread at a time may call it.

    Invariant: the scheduler and the output processor know the same unfinished completions.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        tokenizer: Tokenizer | None,
        processors: ProcessorFactories,
        limits: EngineLimits,
        clock: Clock,
        loras: AdapterPlaces,
        grammars: GrammarCache | None = None,
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """bad_word_ids: what no text may hold, beside what its request bans."""
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self.clock = clock
        self.loras = loras
        self._tokenizer = tokenizer
        self.processors = processors
        self._grammars = grammars
        self._bad_word_ids = bad_word_ids
        self._loop = StepLoop(scheduler, executor, depth)
        self._outputs = OutputProcessor(tokenizer)
        self._children: dict[str, list[str]] = {}
        self._adapters: dict[str, int] = {}

    def validate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        encoder: EncoderInput | None = None,
        images: Sequence[ImageInput] = (),
        lora: str = "",
    ) -> None:
        """Raise RequestError if `add` would refuse the request."""
        limits = self.limits
        self.loras.find(lora)
        if limits.pooling is not None:
            raise RequestError("this model makes vectors, not text", code="not_supported")
        check_encoder_input(encoder, limits)
        check_images(images, prompt_token_ids, limits)
        check_prompt(prompt_token_ids, sampling_params, limits, bool(images))
        validate_params(
            sampling_params,
            vocab_size=limits.vocab_size,
            processors=self.processors,
            max_model_len=limits.max_model_len,
            grammars=self._grammars,
        )
        if self._tokenizer is None and (sampling_params.stop or sampling_params.bad_words):
            raise RequestError("stop strings and bad words need a tokenizer, and skip_tokenizer_init is set")

    def is_prepared(self, sampling_params: SamplingParams) -> bool:
        """False if `add` would take long (a grammar is to be compiled) unless `prepare` is called before."""
        form = sampling_params.structured_output
        return form is None or self._grammars is None or self._grammars.has(form)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Do what takes long in `add`; another thread may call this while the engine steps. Raises RequestError."""
        if sampling_params.structured_output is not None and self._grammars is not None:
            self._grammars.compile(sampling_params.structured_output)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        final_only: bool = False,
        deltas: bool = False,
        output_token_ids: Sequence[int] = (),
        encoder: EncoderInput | None = None,
        encoder_prompt: str | None = None,
        images: Sequence[ImageInput] = (),
        lora: str = "",
    ) -> None:
        """Queue a request. final_only: `step` returns it once, when it is finished. deltas: each output holds only
        what is new (text, token_ids, logprobs). output_token_ids: what an engine that crashed had generated for it
        (n = 1); outputs go on behind that. encoder: the other input of an encoder-decoder model, encoder_prompt the
        text that it was. images: at their places in the prompt. lora: the name of an adapter.

        Raises RequestError if it is invalid or its id is in use.
        """
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use")
        self.validate(prompt_token_ids, sampling_params, encoder, images, lora)
        arrival_s = self.clock.now_s()
        child_ids = (
            [request_id] if sampling_params.n == 1 else [f"{request_id}/{i}" for i in range(sampling_params.n)]
        )
        banned = self._bad_word_ids
        if sampling_params.bad_words:
            assert self._tokenizer is not None
            banned = (*banned, *bad_word_ids(self._tokenizer, sampling_params.bad_words))
        self._outputs.add(
            request_id,
            child_ids,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            arrival_s=arrival_s,
            final_only=final_only,
            deltas=deltas,
            output_token_ids=output_token_ids,
            encoder=encoder,
            encoder_prompt=encoder_prompt,
        )
        self._children[request_id] = child_ids
        if (slot := self.loras.find(lora)) is not None:
            self._adapters[request_id] = slot.number
        sight = self.limits.vision.sight if self.limits.vision is not None else "past"
        num_encoder_tokens, spans = 0, list[CrossSpan]()
        if encoder is not None and self.limits.encoder is not None:
            num_encoder_tokens = encoder.num_tokens(self.limits.encoder)
        vision = self.limits.vision
        if images and vision is not None and vision.is_crossed:
            keys = cross_keys(vision, images, self.limits.block_size)
            encoder, images = EncoderInput(images=images), ()
            num_encoder_tokens, spans = keys.num_keys, list(keys.spans)
        for index, child_id in enumerate(child_ids):
            self.scheduler.add(
                EngineRequest(
                    request_id=child_id,
                    prompt_token_ids=prompt_token_ids,
                    sampling_params=_child_params(sampling_params, index),
                    arrival_s=arrival_s,
                    priority=priority,
                    cache_salt=cache_salt,
                    bad_word_ids=banned,
                    output_token_ids=output_token_ids,
                    encoder=encoder,
                    num_encoder_tokens=num_encoder_tokens,
                    cross_spans=spans,
                    images=images,
                    lora=slot,
                    in_one_step=sight == "prompt",
                    whole_images=sight == "image",
                )
            )

    def add_pooling(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        token_types: Sequence[int] = (),
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a request for a vector: `step` returns it once, with `pooled`. token_types: which text of a pair
        each token belongs to; empty is all 0. Raises RequestError if it is invalid or its id is in use."""
        limits, params = self.limits, SamplingParams(max_tokens=0, detokenize=False)
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use")
        if limits.pooling is None:
            raise RequestError("this model makes text, not vectors", code="not_supported")
        if len(token_types) not in (0, len(prompt_token_ids)):
            raise RequestError(f"{len(prompt_token_ids)} tokens have {len(token_types)} token types")
        check_prompt(prompt_token_ids, params, limits)
        arrival_s = self.clock.now_s()
        self._outputs.add(
            request_id,
            [request_id],
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            arrival_s=arrival_s,
            final_only=True,
        )
        self._children[request_id] = [request_id]
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling_params=params,
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                pooling=limits.pooling,
                token_types=token_types,
                in_one_step=limits.in_one_step,
            )
        )

    def abort(self, request_id: str) -> None:
        """Drop a request; its blocks are free at once. Unknown ids are ignored: it may just have finished."""
        for child_id in self._forget(request_id):
            if child_id in self._outputs:
                self.scheduler.abort(child_id)
                self._outputs.abort(child_id)

    def step(self) -> Sequence[RequestOutput]:
        """Run one step and return the requests that it changed."""
        started_s = self.clock.now_s()
        deltas = self._loop.step()
        for child_id in self._loop.newly_scheduled():
            self._outputs.scheduled(child_id, started_s)
        processed = self._outputs.process(deltas, self.clock.now_s())
        for stopped in processed.stopped:
            self.scheduler.finish(stopped.child_id, "stop", stopped.stop_reason)
        for output in processed.outputs:
            if output.finished:
                self._forget(output.request_id)
        return processed.outputs

    def load_lora(self, name: str, folder: str) -> None:
        """Load an adapter beside the others, for requests that come later. Raises RequestError, ConfigError or
        ModelError, and nothing has changed then."""
        slot, params = self.loras.read(name, folder, self._adapters.values())
        self.executor.call("load_adapter", slot.number, params)
        self.loras.add(name, slot)

    def unload_lora(self, name: str) -> None:
        """Take no further requests for an adapter. Raises RequestError if there is none of this name."""
        self.loras.remove(name)

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the step that was committed last."""
        return self._loop.last_plan

    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._children)

    def close(self) -> None:
        """Drop all requests and free the device; may be called twice."""
        for request_id in list(self._children):
            self.abort(request_id)
        self.executor.close()

    def _forget(self, request_id: str) -> Sequence[str]:
        """The completions of a request that is no longer here."""
        self._adapters.pop(request_id, None)
        return self._children.pop(request_id, ())


def check_prompt(
    prompt_token_ids: Sequence[int], sampling_params: SamplingParams, limits: EngineLimits, has_images: bool = False
) -> None:
    """Raise RequestError for a prompt that is empty, leaves no room for output or has unknown token ids."""
    length = len(prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt is empty: there is no token to start from", code="empty_prompt")
    needs_room = sampling_params.max_tokens != 0
    if length + needs_room > limits.max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens; with at least one token of output that is more than "
            f"max_model_len {limits.max_model_len}",
            code="context_length_exceeded",
            remedies=[f"a prompt of at most {limits.max_model_len - 1} tokens", "a larger --max-model-len"],
        )
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= limits.vocab_size:
        of_images = limits.vision.image_token_id if limits.vision is not None and has_images else None
        unknown = (token for token in prompt_token_ids if not 0 <= token < limits.vocab_size)
        wrong = next((token for token in unknown if token != of_images), None)
        if wrong is None and sampling_params.prompt_logprobs is not None:
            raise RequestError(f"token id {of_images}, which stands for images, has no probability")
        if wrong is None:  # the vocabulary may lack the token of images
            return
        raise RequestError(f"token id {wrong} is outside the vocabulary of {limits.vocab_size}")


def check_encoder_input(encoder: EncoderInput | None, limits: EngineLimits) -> None:
    """Raise RequestError for an input that the model's encoder does not take, or that is missing."""
    spec = limits.encoder
    if spec is None:
        if encoder is not None:
            raise RequestError("this model has no encoder: it takes one prompt", code="not_supported")
        return
    what, count = ("frames", spec.num_features) if spec.num_features else ("tokens", 0)
    if encoder is None or (encoder.features is None) == bool(count) or not encoder.num_tokens(spec):
        raise RequestError(f"the encoder of this model needs {what} to read", code="empty_prompt")
    if encoder.features is not None and encoder.features.shape[1:] != (count,):
        raise RequestError(f"the encoder of this model reads frames of {count} numbers")
    length, most = encoder.num_tokens(spec), spec.max_position_embeddings
    if length > most:
        raise RequestError(
            f"the encoder's prompt has {length} tokens, and {most} is what the encoder reads",
            code="context_length_exceeded",
            remedies=[f"a prompt of at most {most} tokens"],
        )
    wrong = next((token for token in encoder.token_ids if not 0 <= token < spec.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} is outside the vocabulary of {spec.vocab_size}")


def check_images(images: Sequence[ImageInput], prompt_token_ids: Sequence[int], limits: EngineLimits) -> None:
    """Raise RequestError for images that the model does not read, or that do not fit its prompt or memory."""
    if not images:
        return
    vision = limits.vision
    if vision is None:
        raise RequestError("this model reads no images here", code="not_supported")
    places = [place for image in images for place in image.places.tolist()]
    wanted = [i for i, token in enumerate(prompt_token_ids) if token == vision.image_token_id]
    if places != wanted:
        raise RequestError(
            f"the prompt has {len(wanted)} places for rows of images, and the images have {len(places)}",
            code="invalid_image",
        )
    size = limits.block_size
    if vision.is_crossed:
        num_blocks = -(-cross_keys(vision, images, size).num_keys // size)
    else:
        num_blocks = sum({image.digest(): -(-len(image.places) // size) for image in images}.values())
    if num_blocks > limits.num_image_blocks:
        raise RequestError(
            f"the images take {num_blocks * size} rows, and {limits.num_image_blocks * size} can be kept",
            code="context_length_exceeded",
            remedies=[
                "fewer or smaller images",
                "a larger --kv-memory" if vision.is_crossed else "a larger HEADRACE_IMAGE_CACHE_TOKENS",
            ],
        )


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one of n completions: a seed of its own, so that they differ and can be repeated."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % 2**64
    return replace(params, n=1, seed=seed)
