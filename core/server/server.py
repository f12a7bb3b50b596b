"""What all routes share: the model that is served, the engine, who may ask, and what is counted and logged."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request

from ..audio.whisper import Question, WhisperModel, read_whisper
from ..config import EngineConfig
from ..engine.build import describe_model, load_grammars, load_model_tokenizer, read_images
from ..engine.engine import EngineLimits, check_encoder_input, check_prompt
from ..engine.generation import read_generation_config
from ..errors import ConfigError, RequestError
from ..plugin_loader import load_plugins
from ..pooling.tasks import PoolingRequest, PoolingTasks
from ..sampling.params import MAX_COMPLETIONS, SamplingParams
from ..sampling.validate import validate_params
from ..stages import EncoderInput, ImageInput
from ..structured.compiler import GrammarCache
from ..text.seq2seq import DecoderStart, read_decoder_start
from .admission import Admission
from .api_errors import ApiError
from .auth import read_keys
from .engine_client import EngineClient
from .formats.formats import Format, find_format
from .frames import Ready, params_from_wire, params_to_wire
from .generation import Completion, Generation
from .metrics import Metrics
from .prompts import Prompts, image_limits
from .request_log import log_finished
from .responses.store import ResponseStore
from .step_feed import StepFeed
from .tracing import Tracing, make_tracing
from .unknown_fields import UnknownFields

logger = logging.getLogger(__name__)

_TRACE_HEADERS = ("traceparent", "tracestate")


class Server:
    """Owns the front's state. `load` must have ended before a route that needs the model is served."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for keys that cannot be read, and for traces without OpenTelemetry."""
        self.config = config
        self.keys = read_keys(config.server)
        self.metrics = Metrics()
        self.unknown_fields = UnknownFields()
        self.tracing: Tracing | None = make_tracing(config.server.otlp_endpoint)
        self.admission = Admission(
            config.server, num_keys=len(self.keys), by_priority=config.scheduler.policy == "priority"
        )
        self.engine = EngineClient(config, self.admission, self.metrics, self._on_done)
        self.responses = ResponseStore(config.server.max_stored_responses, config.server.max_stored_bytes)
        self.feed = StepFeed(self.engine.watch, lambda: (self.why_not_ready(), self.figures()))
        self.engine.on_trace = self.feed.push
        self.started_s = time.time()
        self._seeds = random.Random(config.scheduler.seed)  # of requests that bring none, in their order
        self.is_draining = False
        self.is_loaded = False
        self.prompts = Prompts(None, "", "")
        self.defaults = SamplingParams()
        self.names: tuple[str, ...] = ()
        self.limits = EngineLimits(vocab_size=0, max_model_len=0)
        self.pooling: PoolingTasks
        self.decoder_start: DecoderStart | None = None
        self._whisper: WhisperModel | None = None
        self.format: Format | None = None
        self._processors: dict[str, Callable[..., Any]] = {}
        self._grammars: GrammarCache | None = None

    async def load(self) -> Ready:
        """Start the engine and read what the front needs of the model. Raises HeadraceError."""
        info = await self.engine.start()
        await asyncio.get_running_loop().run_in_executor(None, self._read_model, info)
        self.is_loaded = True
        return info

    async def close(self) -> None:
        """End the engine; open requests fail."""
        await self.engine.stop()
        self.prompts.close()
        if self.tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.tracing.close)

    # ---- state ------------------------------------------------------------------------------------------------
    @property
    def model_name(self) -> str:
        """The first name of the model, which responses carry."""
        return self.names[0] if self.names else ""

    @property
    def loras(self) -> Mapping[str, str]:
        """Folders of adapters by name, which requests may give for the model's."""
        return self.engine.loras

    def why_not_ready(self) -> str:
        """Why requests cannot be answered now; "" if they can."""
        if self.is_draining:
            return "shutting down"
        if not self.is_loaded:
            return "loading model"
        return self.why_not_alive() or ("" if self.engine.state == "ready" else "restarting the engine")

    def why_not_alive(self) -> str:
        """Why the process should be replaced; "" if it works or is on its way."""
        if self.engine.state == "failed":
            return "the engine cannot be restarted"
        stalled_s = self.engine.stalled_s()
        if stalled_s > self.config.server.stall_timeout_s:
            return f"the engine is stalled: no step for {stalled_s:.0f} s"
        return ""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served, 503 while none is."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})
        if not self.is_loaded:
            raise ApiError(503, "the model is being loaded", code="loading_model", headers={"Retry-After": "5"})
        if name and name not in {*self.names, *self.loras} and name != self.config.model.model:
            message = f"no model {name!r}; this server has {', '.join((*self.names, *self.loras))}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def lora_of(self, name: str | None) -> str:
        """The adapter that a request asks for by its model's name; "" for the model alone."""
        return name if name in self.loras and name is not None else ""

    def check_makes_text(self) -> None:
        """Raise ApiError for a model that makes something else."""
        if self.pooling.tasks():
            message = f"{self.model_name} makes vectors, not text"
            raise ApiError(404, message, code="unsupported_by_model")

    def check_count(self, count: int, what: Literal["completions", "texts"]) -> None:
        """Raise RequestError for more of them than one request may have. To be called before anything is made for
        each."""
        if count > MAX_COMPLETIONS:
            raise RequestError(
                f"one request for {count} {what}; {MAX_COMPLETIONS} are allowed", code=f"too_many_{what}"
            )

    # ---- requests ---------------------------------------------------------------------------------------------
    async def submit(
        self,
        request: Request,
        generation_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        encoders: Sequence[EncoderInput | None] = (),
        images: Sequence[ImageInput] = (),
        lora: str = "",
    ) -> Generation:
        """Check and queue params.n completions of each prompt.

        Completion i of prompt p has index p * n + i. encoders: by prompt, the other input of an encoder-decoder
        model. images: of the one prompt. lora: the adapter. Raises RequestError or ApiError before anything was sent.
        """
        self.check_makes_text()
        self.check_count(len(prompts) * params.n, "completions")
        await self._validate(prompts, params, bool(images))
        sources = encoders or [None] * len(prompts)
        for source in sources:
            check_encoder_input(source, self.limits)
        generation = self._new_generation(request, generation_id)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # A seed of its own for each of a prompt, from here on: a crash changes nothing of what is sampled.
        seeds = [params.seed if params.is_greedy else (seed + i) % 2**64 for i in range(params.n)]
        wires = [params_to_wire(replace(params, n=1, seed=own)) for own in seeds]
        for number, prompt in enumerate(prompts):
            for i, wire in enumerate(wires):
                generation.completions.append(
                    Completion(
                        generation=generation,
                        index=number * params.n + i,
                        prompt_token_ids=prompt,
                        sampling_params=wire,
                        priority=priority,
                        cache_salt=cache_salt,
                        encoder=sources[number],
                        images=images,
                        lora=lora,
                    )
                )
        self.metrics.max_tokens.observe(params.max_tokens if params.max_tokens is not None else 0)
        self.metrics.n.observe(params.n)
        self._queue(generation)
        return generation

    def submit_pooling(
        self, request: Request, generation_id: str, texts: Sequence[PoolingRequest], *, priority: int = 0
    ) -> Generation:
        """Queue a request for the vectors of texts. Raises RequestError or ApiError."""
        self.check_count(len(texts), "texts")
        for text in texts:
            check_prompt(text.token_ids, SamplingParams(max_tokens=0), self.limits)
        generation = self._new_generation(request, generation_id)
        for index, text in enumerate(texts):
            generation.completions.append(
                Completion(
                    generation=generation,
                    index=index,
                    prompt_token_ids=text.token_ids,
                    sampling_params={},
                    priority=priority,
                    is_pooling=True,
                    token_types=text.token_types,
                )
            )
        self._queue(generation)
        return generation

    def submit_questions(self, request: Request, generation_id: str, questions: Sequence[Question]) -> Generation:
        """Queue what a transcription wants to know of one window, a completion for each question."""
        generation = self._new_generation(request, generation_id)
        for index, question in enumerate(questions):
            seed = question.params.seed
            if seed is None and not question.params.is_greedy:
                seed = self._seeds.getrandbits(63)
            generation.completions.append(
                Completion(
                    generation=generation,
                    index=index,
                    prompt_token_ids=question.token_ids,
                    sampling_params=params_to_wire(replace(question.params, seed=seed)),
                    encoder=question.encoder,
                )
            )
        self._queue(generation)
        return generation

    def whisper(self) -> WhisperModel:
        """What transcriptions need to know of the model. Raises ApiError 404 if it does not listen."""
        if self._whisper is None:
            raise ApiError(404, f"{self.model_name} does not listen to speech", code="unsupported_by_model")
        return self._whisper

    def example(self) -> tuple[str, str]:
        """A route that this model serves, and the data of a request as curl takes it."""
        tasks = self.pooling.tasks()
        if self._whisper is not None:
            return "/v1/audio/transcriptions", "-F file=@speech.wav"
        if "embed" in tasks:
            return "/v1/embeddings", """-d '{"input": "Hello"}'"""
        if "score" in tasks:
            return "/v1/rerank", """-d '{"query": "Hello", "documents": ["Good day", "Goodbye"]}'"""
        if tasks:
            return "/v1/classify", """-d '{"input": "Hello"}'"""
        if self.prompts.has_template and self.decoder_start is None:
            return "/v1/chat/completions", """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
        return "/v1/completions", """-d '{"prompt": "Once upon a time", "max_tokens": 20}'"""

    def _new_generation(self, request: Request, generation_id: str) -> Generation:
        return Generation(
            generation_id,
            key=request.state.user,
            on_done=self.engine.generation_done,
            route=request.url.path,
            trace_headers={name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers},
        )

    def _queue(self, generation: Generation) -> None:
        self.engine.submit(generation)
        seconds = self.config.server.request_timeout_s
        timeout = asyncio.get_running_loop().call_later(seconds, generation.fail, _timed_out(seconds))
        generation.on_end(timeout.cancel)

    async def _validate(self, prompts: Sequence[list[int]], params: SamplingParams, has_images: bool = False) -> None:
        for prompt in prompts:
            check_prompt(prompt, params, self.limits, has_images)
        if not self.prompts.has_tokenizer and (params.stop or params.bad_words):
            raise RequestError("stop strings and bad words need a tokenizer, and skip_tokenizer_init is set")

        def check() -> None:
            validate_params(
                params,
                vocab_size=self.limits.vocab_size,
                processors=self._processors,
                max_model_len=self.limits.max_model_len,
                grammars=self._grammars,
            )

        # A grammar may take long to compile.
        await self.prompts.run(check, is_short=params.structured_output is None)

    def gauges(self) -> dict[str, float]:
        """Figures of this moment, by the names that /metrics has them under."""
        stats = self.engine.stats
        usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        return {
            "vllm:num_requests_running": stats.num_running,
            "vllm:num_requests_waiting": stats.num_waiting + self.admission.num_queued,
            "vllm:kv_cache_usage_perc": usage,
            "vllm:gpu_cache_usage_perc": usage,
            "headrace_kv_blocks": stats.num_blocks,
            "headrace_kv_blocks_free": stats.num_free_blocks,
            "headrace_unfinished_requests": self.engine.num_unfinished,
            "headrace_queued_tokens": self.admission.num_waiting_tokens,
            "headrace_engine_ready": float(not self.why_not_ready()),
        }

    def counters(self) -> dict[str, float]:
        """Counters that the engine keeps; they begin again with it."""
        stats = self.engine.stats
        return {
            "vllm:num_preemptions": stats.num_preemptions,
            "vllm:prefix_cache_queries": self.metrics.prompt_tokens,
            "vllm:prefix_cache_hits": stats.num_hit_tokens,
            "vllm:spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        }

    def figures(self) -> dict[str, float]:
        """What the page shows besides steps: gauges, and counters since the server began."""
        stats, metrics = self.engine.stats, self.metrics
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting + self.admission.num_queued,
            "blocks": stats.num_blocks,
            "free_blocks": stats.num_free_blocks,
            "output_tokens": metrics.generation_tokens,
            "first_tokens": metrics.ttft_s.count,
            "ttft_s": metrics.ttft_s.sum,
            "started_tokens": metrics.started_tokens,
            "hit_tokens": metrics.hit_tokens,
            "preemptions": stats.num_preemptions,
            "restarts": metrics.restarts,
        }

    def _on_done(self, generation: Generation) -> None:
        reasons = log_finished(generation, self.metrics)
        if self.tracing is not None:
            self.tracing.record(generation, self.model_name, reasons)

    def _read_model(self, info: Ready) -> None:
        def report(line: str) -> None:
            logger.debug("%s", line)

        config = self.config
        model = describe_model(config, report)
        tokenizer = load_model_tokenizer(config, model, report)
        if model.gguf is not None:
            model.gguf.close()
        self.defaults = params_from_wire(info.sampling_params)
        self.limits = EngineLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            encoder=model.spec.encoder,
            vision=model.spec.vision,
        )
        if model.spec.encoder is not None:
            generation = read_generation_config(model.folder)
            self.decoder_start = read_decoder_start(model.config, generation)
            if model.spec.encoder.num_features:
                self._whisper = read_whisper(model.spec, model.config, generation, tokenizer)
        images = None
        if info.reads_images:
            images = read_images(model, tokenizer, image_limits(config.server))
        self.prompts = Prompts(tokenizer, config.model.chat_template, info.model, images, info.max_model_len)
        self.pooling = PoolingTasks(
            name=model.name,
            spec=model.spec,
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
            prompts=model.prompts,
        )
        if tokenizer is not None:
            self.format = find_format(tokenizer.chat_template, model.folder)
        # Only the engine can try these; it does before the first header of the answer is sent.
        self._processors = dict.fromkeys(info.logits_processors, lambda params, prompt: None)
        self._grammars = load_grammars(load_plugins(), tokenizer, info.vocab_size, info.eos_token_ids)
        names = [name.strip() for name in config.server.served_model_name.split(",") if name.strip()]
        self.names = tuple(names) or (info.model,)
        if both := self.loras.keys() & {*self.names}:
            raise ConfigError(
                f"the model and an adapter are both called {min(both)}", remedies=["another --lora NAME"]
            )


def _timed_out(timeout_s: int) -> ApiError:
    return ApiError(504, f"the request took longer than {timeout_s} s (request_timeout_s)", code="request_timeout")
