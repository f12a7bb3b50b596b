"""The Python API: a model in the caller's process."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from .beam_search import Beam, BeamSearch, BeamSearchParams, read_beam_search
from .config import EngineConfig
from .engine.build import Built, build_engine
from .engine.shared import SharedEngine
from .errors import ModelError, RequestError
from .llm_inputs import (
    AudioInput,
    Lora,
    Message,
    Prompt,
    as_conversations,
    as_many,
    as_messages,
    as_params,
    as_recordings,
    as_texts,
    check_keys,
    check_salt,
    flat_options,
    images_of,
    is_one_prompt,
    loras_each,
    params_each,
    priorities_each,
)
from .pooling.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from .pooling.params import PoolingParams
from .pooling.tasks import PoolingRequest, TextInput
from .sampling.params import SamplingParams
from .sampling.validate import MAX_LOGPROBS
from .stack_limit import check_stack
from .stages import CompletionOutput, FloatArray, RequestOutput
from .text.chat import ChatTemplate, read_template
from .text.inputs import token_ids
from .text.seq2seq import PreparedPrompt, prepare_seq2seq
from .text.tokenizer import Tokenizer
from .vision.images import take_images

if TYPE_CHECKING:  # what few models need is imported for them
    from .audio.whisper import Answer, Transcription, TranscriptionParams
    from .vision.processor import ImageReader

logger = logging.getLogger(__name__)


class LLM:
    """A language model, loaded and ready. Use as a context manager, or call `close`.

    Several threads may use it at once: their requests share the steps.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        skip_tokenizer_init: bool = False,
        **engine_options: Any,
    ) -> None:
        """Load `model`: a hub id, a folder, a .gguf file, or "" for the embedded default.

        quantize: "int8", "int4" and others (docs/weights.md): weights are made smaller while they load.
        engine_options: any option of the configuration, such as max_model_len=4096, kv_memory="2GiB" or
        lora={"name": "folder"}.
        Raises ConfigError, ModelError, CapacityError or PlatformError.
        """
        options = dict(
            engine_options,
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            device=device,
            dtype=dtype,
            quantize="none" if quantize is None else quantize,
            skip_tokenizer_init=skip_tokenizer_init,
        )
        self._start(EngineConfig.from_options(options), lambda line: logger.info("%s", line))

    @classmethod
    def from_config(cls, config: EngineConfig, report: Callable[[str], None] = lambda line: None) -> Self:
        """Load the model that a configuration names. `report` takes progress lines."""
        self = cls.__new__(cls)
        self._start(config, report)
        return self

    def _start(self, config: EngineConfig, report: Callable[[str], None]) -> None:
        check_stack()
        self.config = config
        if config.model.chat_template:
            read_template(config.model.chat_template)  # a wrong one is told before anything is loaded
        self.built: Built = build_engine(config, report)
        self._shared = SharedEngine(self.built.engine)
        self._ids = itertools.count()
        self._chat_template: ChatTemplate | None = None
        self._image_reader: ImageReader | None = None

    # ---- what it is ---------------------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ModelError if the model was loaded without one."""
        if self.built.tokenizer is None:
            raise ModelError("this model was loaded with skip_tokenizer_init, so it has no tokenizer")
        return self.built.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The same, by vLLM's name."""
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self.built.capacity.max_model_len

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What applies where a call gives no sampling parameters: the checkpoint's generation config."""
        return self.built.defaults.sampling_params

    @property
    def has_chat_template(self) -> bool:
        """True if `chat` can be used."""
        if self.built.defaults.decoder_start is not None:
            return False  # an encoder-decoder model reads its prompt as it is
        return bool(self.config.model.chat_template) or (
            self.built.tokenizer is not None and self.built.tokenizer.chat_template is not None
        )

    # ---- what it does -------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | int = 0,
        cache_salt: str = "",
        lora: Lora = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one or more prompts; the results come in the order of the prompts.

        lora: the adapter, by the name that it was loaded under, one for all or one for each. use_tqdm: vLLM's; no bar
        is drawn. All prompts are checked before any runs. Raises RequestError.
        """
        many = as_many(prompts, "prompts", is_one_prompt)
        return self._run(many, self._tokens, sampling_params, priority, cache_salt, lora)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. lora: as for `generate`. template_options go to the chat template
        (tools=..., ...), itself given as chat_template=... if not the model's own."""
        many = as_conversations(messages)
        return self._run(many, lambda each: self._chat_tokens(each, **template_options), sampling_params, lora=lora)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None, *, lora: str | None = None
    ) -> list[list[CompletionOutput]]:
        """The likeliest completions of each prompt, the best first; without params as the checkpoint's
        generation_config.json says (num_beams, ...). Each step is one of the engine, which shares what beams have in
        common. Raises RequestError.
        """
        many = as_many(prompts, "prompts", is_one_prompt)
        defaults = self.built.defaults
        params = (
            read_beam_search(defaults.generation) if params is None else as_params(params, BeamSearchParams, "params")
        )
        prepared = [self._tokens(prompt) for prompt in many]
        forced = defaults.decoder_start.forced_token_id if defaults.decoder_start is not None else -1
        searches = [
            BeamSearch(
                params,
                each.token_ids,
                defaults.eos_token_ids,
                defaults.bad_word_ids,
                int(each.token_ids[1:] == [forced]),
            )
            for each in prepared
        ]
        if (count := max((search.num_candidates for search in searches), default=0)) > MAX_LOGPROBS:
            raise RequestError(
                f"beams of {params.beam_width} and {len(defaults.eos_token_ids)} tokens that end a text are {count} "
                f"candidates a step, and {MAX_LOGPROBS} are served",
                remedies=["a smaller beam_width"],
            )
        while open_ones := [pair for pair in zip(prepared, searches, strict=True) if not pair[1].is_done]:
            self._extend_beams(open_ones, lora)
        return [[self._completion(i, beam) for i, beam in enumerate(search.ended)] for search in searches]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt or answer one conversation; yields all that there is after each step.

        Leaving the loop early aborts the request.
        """
        if isinstance(prompt, (str, Mapping)):
            prepared = self._tokens(prompt)
        else:
            prepared = self._chat_tokens(prompt)
        [params] = params_each(sampling_params, 1, self.default_sampling_params)
        outputs = self._follow(self._add(prepared, params, lora=loras_each(lora, 1)[0]))
        next(outputs)  # a generator that has begun ends its request when it is left, read or not
        return cast(Iterator[RequestOutput], outputs)

    def embed(
        self, prompts: TextInput | Sequence[TextInput], pooling_params: PoolingParams | None = None
    ) -> list[EmbeddingOutput]:
        """The embedding of one text or several. A tuple of two strings is one pair; a list holds several texts.

        Raises RequestError, with the code "not_supported" if the model makes no embeddings.
        """
        tasks, params = self.built.pooling, as_params(pooling_params, PoolingParams, "pooling_params")
        tasks.require("embed")
        requests = self._prepare(prompts, params)
        vectors = self._pool(requests)
        return [tasks.embedding(each, vector, params) for each, vector in zip(requests, vectors, strict=True)]

    def classify(
        self, prompts: TextInput | Sequence[TextInput], pooling_params: PoolingParams | None = None
    ) -> list[ClassificationOutput]:
        """The scores of all labels for one text or several. Raises RequestError as `embed` does."""
        tasks, params = self.built.pooling, as_params(pooling_params, PoolingParams, "pooling_params")
        tasks.require("classify")
        requests = self._prepare(prompts, params)
        vectors = self._pool(requests)
        return [tasks.classes(each, vector, params) for each, vector in zip(requests, vectors, strict=True)]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoreOutput]:
        """How well each document fits the query (or its own one, if there are as many queries as documents).

        A classifier with one label reads query and document together; with an embedding model it is the cosine of
        their embeddings. Raises RequestError as `embed` does.
        """
        tasks, params = self.built.pooling, as_params(pooling_params, PoolingParams, "pooling_params")
        tasks.require("score")
        texts = as_texts(documents, "documents")
        queries = as_texts(query, "queries")
        if len(queries) not in (1, len(texts)):
            raise RequestError(f"{len(queries)} queries do not go with {len(texts)} documents: give one, or as many")
        if tasks.reads_pairs:
            pairs = [(queries[i % len(queries)], text) for i, text in enumerate(texts)]
            requests = self._prepare(pairs, params)
            vectors = self._pool(requests)
            return [tasks.pair_score(each, vector, params) for each, vector in zip(requests, vectors, strict=True)]
        embedded = self.embed([*queries, *texts], params)
        firsts, seconds = embedded[: len(queries)], embedded[len(queries) :]
        return [tasks.similarity(firsts[i % len(firsts)], second) for i, second in enumerate(seconds)]

    def transcribe(
        self, audio: AudioInput | Sequence[AudioInput], params: "TranscriptionParams | None" = None
    ) -> "list[Transcription]":
        """The text of one recording or several: file, bytes of a file, or float samples at 16 kHz.

        Raises RequestError, with the code "not_supported" if the model does not listen.
        """
        model = self.built.whisper()
        from .audio.decode import read_audio
        from .audio.whisper import Transcriber, TranscriptionParams

        params = as_params(params, TranscriptionParams, "params")
        many = as_recordings(audio)
        jobs = [
            Transcriber(model, each if isinstance(each, np.ndarray) else read_audio(each), params) for each in many
        ]
        asked = {n: job.ask() for n, job in enumerate(jobs)}
        answers: dict[int, dict[int, Answer]] = {}
        waiting: dict[str, tuple[int, int]] = {}  # request -> its recording and its place among the questions
        open_jobs: list[tuple[int, list[Answer] | None]] = [(n, None) for n in asked]
        try:
            while open_jobs or waiting:
                for n, found in open_jobs:
                    try:
                        questions = next(asked[n]) if found is None else asked[n].send(found)
                    except StopIteration:
                        continue
                    answers[n] = {}
                    for place, question in enumerate(questions):
                        prompt = PreparedPrompt(token_ids=question.token_ids, encoder=question.encoder)
                        waiting[self._add(prompt, question.params, final_only=True)] = (n, place)
                open_jobs = []
                for output in self._shared.news(waiting.keys()) if waiting else ():
                    n, place = waiting.pop(output.request_id)
                    answers[n][place] = _answer(output)
                    if n not in {job for job, _ in waiting.values()}:
                        open_jobs.append((n, [answers[n][i] for i in range(len(answers[n]))]))
        except BaseException:
            self._shared.drop(waiting)
            raise
        return [job.result() for job in jobs]

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return tuple(self._shared.engine.loras)

    def load_lora(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter beside the others, at one of the places that max_loras keeps. Raises RequestError if there
        is none or the name is in use, ConfigError or ModelError for what is no adapter of this model."""
        with self._shared.held() as engine:
            engine.load_lora(name, os.fspath(folder))

    def unload_lora(self, name: str) -> None:
        """Free the place of an adapter; requests that run through it go on. Raises RequestError."""
        with self._shared.held() as engine:
            engine.unload_lora(name)

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> str:
        """The prompt that the chat template makes of a conversation."""
        if self.built.defaults.decoder_start is not None:
            raise RequestError(
                f"{self.built.model.name} is an encoder-decoder model: it cannot chat",
                code="not_supported",
                remedies=["generate with a plain prompt"],
            )
        options = flat_options(template_options)
        if (source := options.pop("chat_template", None)) is not None:
            template = ChatTemplate(source, self.tokenizer.special_tokens)
        else:
            template = self._chat_template = self._chat_template or self._load_chat_template()
        if self.built.model.spec.vision is not None:
            options["image_placeholder"] = self._images.placeholder
        return template.render(messages, **options)

    def close(self) -> None:
        """Free the model; may be called twice."""
        if self._shared.close():
            self.built.device.close()

    def __enter__(self) -> Self:
        assert self._shared.engine is not None  # raises if it is closed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- how ----------------------------------------------------------------------------------------------
    def _tokens(self, prompt: Prompt) -> PreparedPrompt:
        start = self.built.defaults.decoder_start
        if start is not None:
            return prepare_seq2seq(prompt, start, self.built.tokenizer)
        if isinstance(prompt, str):
            return PreparedPrompt(text=prompt, token_ids=self.tokenizer.encode(prompt))
        if not isinstance(prompt, Mapping):
            raise RequestError(f"a prompt is text or has prompt or prompt_token_ids, got {type(prompt).__name__}")
        given: Any = prompt.get("prompt_token_ids")
        text: Any = prompt.get("prompt")
        if given is None and not isinstance(text, str):
            keys = ", ".join(map(str, prompt))
            raise RequestError(f"a prompt is text or has prompt or prompt_token_ids, got the keys {keys}")
        check_keys(prompt)
        sources = images_of(prompt.get("multi_modal_data"))
        if sources:
            return self._with_images(text if given is None else token_ids(given), sources)
        return self._tokens(text) if given is None else PreparedPrompt(token_ids=token_ids(given))

    def _chat_tokens(self, messages: Sequence[Message], **template_options: Any) -> PreparedPrompt:
        plain, sources = take_images(as_messages(messages))
        text = self.render_chat(plain, **template_options)
        if sources:
            return self._with_images(text, sources, add_special_tokens=False)
        return PreparedPrompt(text=text, token_ids=self.tokenizer.encode(text, add_special_tokens=False))

    def _with_images(
        self, prompt: str | list[int], sources: Sequence[Any], add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """A prompt whose placeholders are made room for its images."""
        reader = self._images
        text = prompt if isinstance(prompt, str) else None
        if text is not None and reader.placeholder not in text:
            prompt = text = reader.with_placeholders(text, len(sources))
        token_ids, images = reader.prepare(prompt, sources, add_special_tokens=add_special_tokens)
        return PreparedPrompt(text=text, token_ids=token_ids, images=images)

    def _run(
        self,
        many: Sequence[Any],
        tokenize: Callable[[Any], PreparedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | int = 0,
        cache_salt: str = "",
        lora: Lora = None,
    ) -> list[RequestOutput]:
        params = params_each(sampling_params, len(many), self.default_sampling_params)
        priorities, cache_salt = priorities_each(priority, len(many)), check_salt(cache_salt)
        loras = loras_each(lora, len(many))
        prompts: list[PreparedPrompt] = []
        for index, (each, wanted, name) in enumerate(zip(many, params, loras, strict=True)):
            try:
                prompt = tokenize(each)
                prompts.append(prompt)
                self._shared.engine.validate(prompt.token_ids, wanted, prompt.encoder, prompt.images, name)
            except RequestError as error:
                if len(many) == 1:
                    raise
                reason = f"prompt {index} of {len(many)}: {error.reason}"
                raise RequestError(reason, code=error.code, remedies=error.remedies) from error
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for prompt, each, rank, name in zip(prompts, params, priorities, loras, strict=True):
                ids.append(self._add(prompt, each, rank, cache_salt, lora=name, final_only=True))
            mine = set(ids)
            while len(finished) < len(ids):
                finished.update((output.request_id, output) for output in self._shared.news(mine))
        except BaseException:
            self._shared.drop(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def _extend_beams(self, searches: Sequence[tuple[PreparedPrompt, BeamSearch]], lora: str | None) -> None:
        """One step of all these searches."""
        count = min(max(search.num_logprobs for _, search in searches), MAX_LOGPROBS)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=False)
        rows = [
            dataclasses.replace(prompt, token_ids=[*prompt.token_ids, *beam.token_ids])
            for prompt, search in searches
            for beam in search.open
        ]
        answers = iter(self._run(rows, lambda prompt: prompt, params, lora=lora))
        for _, search in searches:
            found = [next(answers).outputs[0].logprobs or [{}] for _ in search.open]
            search.advance([{token: entry.logprob for token, entry in row[0].items()} for row in found])

    def _completion(self, index: int, beam: Beam) -> CompletionOutput:
        ids, tokenizer = list(beam.token_ids), self.built.tokenizer
        return CompletionOutput(
            index=index,
            text=tokenizer.decode(ids) if tokenizer is not None else "",
            token_ids=ids,
            cumulative_logprob=beam.logprob,
            finish_reason="stop" if beam.has_stopped else "length",
        )

    def _prepare(self, texts: TextInput | Sequence[TextInput], params: PoolingParams) -> list[PoolingRequest]:
        """Tokens of all texts; all are checked before any runs."""
        many = as_many(texts, "texts", lambda given: isinstance(given, str | Mapping | tuple))
        prepared: list[PoolingRequest] = []
        for index, text in enumerate(many):
            try:
                prepared.append(self.built.pooling.prepare(text, params))
            except RequestError as error:
                if len(many) == 1:
                    raise
                reason = f"text {index} of {len(many)}: {error.reason}"
                raise RequestError(reason, code=error.code, remedies=error.remedies) from error
        return prepared

    def _pool(self, requests: Sequence[PoolingRequest]) -> list[FloatArray]:
        """The vector of each request. Raises RequestError if one of them fails."""
        ids: list[str] = []
        vectors: dict[str, FloatArray] = {}
        try:
            for request in requests:
                request_id = str(next(self._ids))
                with self._shared.held() as engine:
                    engine.add_pooling(
                        request_id, request.token_ids, token_types=request.token_types, prompt=request.text
                    )
                ids.append(request_id)
            mine = set(ids)
            while len(vectors) < len(ids):
                for output in self._shared.news(mine):
                    if output.pooled is None:
                        raise RequestError(output.error or "the request was dropped")
                    vectors[output.request_id] = output.pooled
        except BaseException:
            self._shared.drop(ids)
            raise
        return [vectors[request_id] for request_id in ids]

    def _follow(self, request_id: str) -> Iterator[RequestOutput | None]:
        """None, then what is new."""
        finished = False
        try:
            yield None
            while not finished:
                for output in self._shared.news({request_id}):
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._shared.drop([request_id])

    def _add(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        *,
        lora: str = "",
        final_only: bool = False,
    ) -> str:
        request_id = str(next(self._ids))
        with self._shared.held() as engine:
            engine.add(
                request_id,
                prompt.token_ids,
                params,
                prompt=prompt.text,
                priority=priority,
                cache_salt=cache_salt,
                final_only=final_only,
                encoder=prompt.encoder,
                encoder_prompt=prompt.encoder_text,
                images=prompt.images,
                lora=lora,
            )
        return request_id

    @property
    def _images(self) -> "ImageReader":
        if self._image_reader is None:
            self._image_reader = self.built.images()
        return self._image_reader

    def _load_chat_template(self) -> ChatTemplate:
        source: Any
        if self.config.model.chat_template:
            source = read_template(self.config.model.chat_template)
        else:
            source = self.tokenizer.chat_template
        if source is None:
            raise RequestError(
                f"{self.built.model.name} has no chat template, so it cannot chat",
                code="no_chat_template",
                remedies=["--chat-template FILE", "generate with a plain prompt (headrace complete --raw)"],
            )
        return ChatTemplate(source, self.tokenizer.special_tokens)


def _answer(output: RequestOutput) -> "Answer":
    """What Whisper's code wants to know of a request. Raises RequestError if it failed."""
    if output.error:
        raise RequestError(output.error)
    one = output.outputs[0]
    last = output.prompt_logprobs[-1] if output.prompt_logprobs else None
    from .audio.whisper import Answer

    return Answer(
        token_ids=one.token_ids,
        logprobs=[entry[token].logprob for entry, token in zip(one.logprobs or (), one.token_ids, strict=False)],
        prompt_logprob=last[output.prompt_token_ids[-1]].logprob if last else 0.0,
    )
