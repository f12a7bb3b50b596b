"""From settings to a running engine: find the model, open the device, decide, load, allocate, warm up."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..clock import Clock, MonotonicClock
from ..config import EngineConfig, parse_speculative
from ..devices import open_device
from ..errors import CapacityError, ModelError, RequestError
from ..extras import images_remedies
from ..hub import LocalModel, is_default, resolve_config, resolve_model, resolve_tokenizer
from ..kv.block_manager import BlockManager
from ..kv.groups import cross_group
from ..models.config import HFConfig, read_config
from ..models.declare import declare_params
from ..models.gguf_config import config_from_gguf, with_gguf_pooler
from ..models.gguf_names import gguf_names
from ..models.heads import (
    computes_in_one_step,
    is_classifier,
    with_asked_pooler,
    with_default_pooler,
    with_head_names,
)
from ..models.name_tables import checkpoint_names
from ..models.registry import family_of, is_foreign, read_spec, unknown_family
from ..models.rope import rope_rows
from ..models.sentence import SentencePrompts, dense_folders, read_prompts, with_sentence_modules
from ..models.spec import ModelSpec
from ..models.vision_families import reads_images
from ..ops import Selection
from ..platform import Caps, Device, Gap, RunnerConfig, Status
from ..plugin_loader import Plugins, load_plugins
from ..pooling.tasks import PoolingTasks
from ..progress import Report
from ..runner.runner import build_model_runner
from ..sampling.validate import ProcessorFactories
from ..scheduler.scheduler import Scheduler
from ..structured.compiler import GrammarCache, GrammarCompiler, Vocabulary
from ..text.gguf_tokenizer import tokenizer_from_gguf
from ..text.tokenizer import Tokenizer, load_tokenizer
from ..units import format_bytes
from ..vision.images import ImageLimits
from ..weights.decoded import DecodedSource, kept_scheme
from ..weights.dummy import DummyParams
from ..weights.gguf import GGUFSource
from ..weights.joined import JoinedSource
from ..weights.load import CheckpointParams
from ..weights.names import NameTable
from ..weights.open import open_weights
from ..weights.quantize import QuantizedParams
from ..weights.source import ParamSource, WeightSource
from ..weights.unstacked import UnstackedSource
from .adapters import (
    Adapter,
    AdapterParams,
    AdapterPlaces,
    adapter_params,
    check_ranks,
    read_adapters,
    with_adapters,
    without_adapters,
)
from .drafters import find_drafter
from .engine import Engine, EngineLimits
from .generation import GenerationDefaults, generation_defaults, read_generation_config, with_processors
from .inprocess import InProcessExecutor
from .resolve import (
    Capacity,
    Choice,
    PackedBytes,
    foreign_gaps,
    image_bytes,
    param_bytes,
    quantization_gaps,
    resolve_capacity,
    resolve_dtype,
    resolve_gaps,
    resolve_runner,
    stored_bytes,
)

if TYPE_CHECKING:
    from ..audio.whisper import WhisperModel
    from ..vision.processor import ImageReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as its files describe it; no weight has been read."""

    name: str
    path: Path
    config: HFConfig
    spec: ModelSpec
    names: NameTable
    gguf: GGUFSource | None
    """the open file, if the model is one GGUF"""
    prompts: SentencePrompts = field(default_factory=SentencePrompts)
    """what sentence-transformers puts before a text"""
    adapters: tuple[Adapter, ...] = ()
    """for which the spec has room"""
    adapter_names: NameTable | None = None
    """of layers as adapters call them, if the spec has room for any"""

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder, None for a single file."""
        return self.path if self.path.is_dir() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine and what a front end wants to know of it."""

    engine: Engine
    model: Model
    device: Device
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    pooling: PoolingTasks
    capacity: Capacity
    choices: tuple[Choice, ...]
    gaps: tuple[Gap, ...]

    def images(self, limits: ImageLimits | None = None) -> "ImageReader":
        """What prepares prompts with images. Raises RequestError if the model reads none."""
        return read_images(self.model, self.tokenizer, limits or ImageLimits())

    def whisper(self) -> "WhisperModel":
        """What transcriptions need to know of the model. Raises RequestError if it does not listen."""
        from ..audio.whisper import read_whisper

        model = self.model
        return read_whisper(model.spec, model.config, read_generation_config(model.folder), self.tokenizer)


def describe_model(config: EngineConfig, report: Report, *, with_images: bool = True) -> Model:
    """Find the model's config (downloading it, but no weights, if it is nowhere here) and translate it, with room for
    the adapters that are asked for.

    with_images: False leaves out what reads images. The default model is one file, so all of it is fetched.
    """
    model = _describe(config, report, with_images=with_images)
    if not config.model.lora and not config.model.max_loras:
        return model
    names = model.names
    if model.gguf is not None and model.spec.foreign is None:  # adapters are called as in safetensors
        names = checkpoint_names(family_of(model.config).weights, model.spec)
    adapters = read_adapters(config.model, model.spec, names)
    spec = with_adapters(model.spec, adapters, config.model)
    return replace(model, adapters=adapters, adapter_names=names, spec=spec)


def _describe(config: EngineConfig, report: Report, *, with_images: bool) -> Model:
    find = resolve_model if is_default(config.model) else resolve_config
    files = find(config.model, report)
    with_images = with_images and config.model.images
    if files.kind == "gguf":
        source = GGUFSource(files.path)
        hf_config = config_from_gguf(source.metadata, source.names(), source.read)
        spec = with_gguf_pooler(with_default_pooler(read_spec(hf_config), hf_config), source.metadata)
        spec = with_asked_pooler(spec, config.model.pooling)
        names = gguf_names(str(source.metadata["general.architecture"]), spec, source.names())
        return Model(
            name=files.name,
            path=files.path,
            config=hf_config,
            spec=spec,
            names=with_head_names(names, spec),
            gguf=source,
        )
    hf_config = read_config(files.path)
    if is_foreign(hf_config):
        return _describe_foreign(config, files, hf_config)
    family = family_of(hf_config, with_images=with_images)
    spec = with_default_pooler(family.to_spec(hf_config), hf_config)
    spec = with_sentence_modules(spec, files.path)
    spec = with_asked_pooler(spec, config.model.pooling)
    return Model(
        name=files.name,
        path=files.path,
        config=hf_config,
        spec=spec,
        names=with_head_names(checkpoint_names(family.weights, spec), spec),
        gguf=None,
        prompts=read_prompts(files.path),
    )


def _describe_foreign(config: EngineConfig, files: LocalModel, hf_config: HFConfig) -> Model:
    """A model of no family, if transformers' own code can serve it. Raises ModelError."""
    if find_spec("torch") is None:
        raise unknown_family(hf_config.model_type, "its own code in transformers needs torch: headrace[torch]")
    if config.model.quantize != "none" or config.model.pooling != "auto" or is_classifier(hf_config):
        raise unknown_family(hf_config.model_type, "as it is, without --quantize, it can only generate text")
    from ..foreign.module import read_foreign_spec

    spec = read_foreign_spec(hf_config, files.path, trust_remote_code=config.model.trust_remote_code)
    return Model(
        name=files.name, path=files.path, config=hf_config, spec=spec, names=NameTable(entries={}), gguf=None
    )


def model_bytes(
    model: Model, config: EngineConfig, dtype: str, caps: Caps, packed_bytes: PackedBytes, *, tp_size: int = 1
) -> tuple[int, int]:
    """Bytes of a model's weights on a device, which keeps the GGUF blocks of its schemes if dtype is auto, and how
    many of them a decode step does not read: of a table that is only looked up it takes a row."""
    looked_up = ["embed_positions.weight"]
    if not model.spec.tie_word_embeddings:
        looked_up.append("embed_tokens.weight")
    if model.gguf is None or config.model.dtype != "auto" or config.model.quantize != "none":
        stored = model.config.quantization() if config.model.dtype == "auto" else {}
        sizes = param_bytes(
            model.spec,
            dtype,
            config.model.quantize,
            caps,
            packed_bytes,
            tp_size=tp_size,
            kept=lambda param: kept_scheme(param, stored, model.names) if stored else None,
        )
        looked_up += [name for name in sizes if name.startswith("encoder.")]  # read once a request
    else:
        infos = (model.gguf.info(name) for name in model.gguf.names())
        sizes = stored_bytes(infos, dtype, caps, packed_bytes)
        sizes |= {param.name: packed_bytes(param.shape, dtype) for param in adapter_params(model.spec)}
        looked_up = [str(model.names.entries.get(name)) for name in looked_up]
    return sum(sizes.values()), sum(sizes.get(name, 0) for name in looked_up)


def _num_image_blocks(config: RunnerConfig, capacity: Capacity) -> int:
    """Blocks that the rows of a request's images, or their keys, may take."""
    if config.spec.vision is not None and config.spec.vision.is_crossed:
        index = cross_group(config.groups)
        return min(capacity.kv.num_blocks[index] - 1, config.groups[index].num_tokens // config.block_size)
    return max(0, config.num_image_rows // config.block_size - 1)


def read_images(model: Model, tokenizer: Tokenizer | None, limits: ImageLimits) -> "ImageReader":
    """What prepares prompts with images for a model. Raises RequestError if it reads none."""
    if model.spec.vision is None or model.folder is None:
        remedies = images_remedies() if reads_images(model.config) else []
        raise RequestError(f"{model.name} reads no images", code="not_supported", remedies=remedies)
    from ..vision.processor import ImageReader

    return ImageReader(
        folder=model.folder,
        model_type=model.config.model_type,
        vision=model.spec.vision,
        tokenizer=tokenizer,
        limits=limits,
    )


def load_model_tokenizer(config: EngineConfig, model: Model, report: Report) -> Tokenizer | None:
    """The model's tokenizer, checked against its vocabulary; None with skip_tokenizer_init."""
    if config.model.skip_tokenizer_init:
        return None
    if config.model.tokenizer:
        tokenizer = load_tokenizer(resolve_tokenizer(config.model, report))
    elif model.gguf is not None:
        tokenizer = tokenizer_from_gguf(model.gguf.metadata)
    else:
        tokenizer = load_tokenizer(model.path)
    rows, own = model.spec.vocab_size, tokenizer.base_vocab_size
    if own > rows:
        raise ModelError(
            f"the tokenizer of {model.name} has {own} tokens, but the weights only {rows} rows: they do not belong "
            "together",
            remedies=["HEADRACE_TOKENIZER=... with the model's own tokenizer"],
        )
    if tokenizer.vocab_size > rows:
        logger.warning("the tokenizer has added tokens without weights: ids %d to %d", rows, tokenizer.vocab_size - 1)
    return tokenizer


def build_engine(config: EngineConfig, report: Report = lambda line: None, clock: Clock | None = None) -> Built:
    """Build and start an engine. Whatever was opened is closed again if a step fails."""
    clock = clock or MonotonicClock()
    with ExitStack() as cleanup:
        model = describe_model(config, report)
        if model.gguf is not None:
            cleanup.callback(model.gguf.close)
        tokenizer = load_model_tokenizer(config, model, report)
        plugins = load_plugins()
        device = open_device(config, plugins)
        cleanup.callback(device.close)
        gaps = [
            *resolve_gaps(device, model.spec),
            *foreign_gaps(model.spec, device.tp_size),
            *quantization_gaps(model.spec, config.model.quantize, device.caps),
        ]
        check_ranks(model.spec, device.tp_size)
        if any(gap.feature == "images" for gap in gaps):
            model = describe_model(config, report, with_images=False)
        dtype = resolve_dtype(config.model.dtype, model.spec, device.caps, blocked=model.gguf is not None)
        runner_config = resolve_runner(config, model.spec, device.caps, dtype.value)
        config = runner_config.engine
        runner = device.runner(runner_config)
        cleanup.callback(runner.close)
        needed, _ = model_bytes(model, config, dtype.value, device.caps, device.packed_bytes, tp_size=device.tp_size)
        memory = runner.memory()
        if needed > memory.free_bytes:
            raise CapacityError(
                f"{model.name} does not fit on {device.info.id}: weights {format_bytes(needed)} ({dtype.value}); "
                f"{format_bytes(memory.free_bytes)} free",
                remedies=[f"headrace plan {config.model.model}".rstrip()],
            )
        if model.gguf is None:
            model = replace(model, path=resolve_model(config.model, report, memory_bytes=memory.free_bytes).path)
        capacity = resolve_capacity(
            config,
            model.spec,
            runner_config.groups,
            runner.kv_plan(),
            memory,
            caps=device.caps,
            name=f"{model.name} on {device.info.id}",
            needed_bytes=needed + image_bytes(runner_config),
        )
        runner_config = replace(runner_config, max_model_len=capacity.max_model_len)
        drafter = find_drafter(plugins, config.scheduler.speculative)
        started_s = time.monotonic()
        load_params(config, model, dtype.value, runner.load, device)
        load_s = time.monotonic() - started_s
        processors = _processors(plugins)
        ends = tokenizer.end_token_ids if tokenizer is not None else ()
        defaults = generation_defaults(model.folder, model.config, ends, has_encoder=model.spec.encoder is not None)
        defaults = with_processors(defaults, processors)
        grammars = load_grammars(plugins, tokenizer, model.spec.vocab_size, defaults.eos_token_ids)
        executor = InProcessExecutor(
            build_model_runner(
                runner,
                runner_config,
                processors,
                grammars=grammars,
                end_token_ids=defaults.eos_token_ids,
                rope_rows=rope_rows(model.spec),
                drafter=drafter,
            ),
            capacity.kv.num_blocks,
        )
        executor.start()
        depth = 0 if drafter else device.caps.depth  # drafts are guessed from tokens that the host knows
        scheduler = Scheduler(
            config=config.scheduler,
            block_manager=BlockManager(
                groups=runner_config.groups,
                num_blocks=capacity.kv.num_blocks,
                block_size=runner_config.block_size,
                prefix_caching=config.kv.prefix_caching,
                hash_seed=config.kv.hash_seed,
                num_image_rows=runner_config.num_image_rows,
            ),
            clock=clock,
            depth=depth,
            num_draft_tokens=runner_config.num_draft_tokens,
            max_num_samples=runner_config.max_num_samples,
            max_model_len=capacity.max_model_len,
            eos_token_ids=defaults.eos_token_ids,
            rope_rows=rope_rows(model.spec),
        )
        engine = Engine(
            scheduler=scheduler,
            executor=executor,
            depth=depth,
            tokenizer=tokenizer,
            processors=processors,
            bad_word_ids=defaults.bad_word_ids,
            limits=EngineLimits(
                vocab_size=model.spec.vocab_size,
                max_model_len=capacity.max_model_len,
                pooling=model.spec.pooler.kind if model.spec.pooler is not None else None,
                in_one_step=computes_in_one_step(model.spec),
                encoder=model.spec.encoder,
                vision=model.spec.vision,
                num_image_blocks=_num_image_blocks(runner_config, capacity),
                block_size=runner_config.block_size,
            ),
            loras=AdapterPlaces(model.spec, model.adapter_names or model.names, model.adapters),
            clock=clock,
            grammars=grammars,
        )
        cleanup.pop_all()
        built = Built(
            engine=engine,
            model=model,
            device=device,
            tokenizer=tokenizer,
            defaults=defaults,
            pooling=PoolingTasks(
                name=model.name,
                spec=model.spec,
                tokenizer=tokenizer,
                max_model_len=capacity.max_model_len,
                prompts=model.prompts,
            ),
            capacity=capacity,
            choices=(
                Choice(
                    name="device",
                    value=device.info.id,
                    reason=", ".join((device.info.name, *(f"{k} {v}" for k, v in device.describe().items()))),
                ),
                Choice(
                    name="model", value=model.name, reason=f"{model.spec.model_type}, {model.spec.num_layers} layers"
                ),
                dtype,
                *_ops_choice(runner.op_selections),
                Choice(name="weights", value=format_bytes(needed), reason=f"loaded in {load_s:.2f} s"),
                Choice(
                    name="kv",
                    value=format_bytes(capacity.kv.total_bytes),
                    reason=f"{runner_config.kv_dtype or dtype.value}, {capacity.reason}; "
                    f"{capacity.kv.num_full_length:.1f} requests of "
                    f"{capacity.max_model_len} tokens"
                    if runner_config.groups
                    else f"an encoder keeps nothing; texts of up to {capacity.max_model_len} tokens",
                ),
                *_lora_choice(model, device, dtype.value),
                *_speculation_choice(config, device.caps),
            ),
            gaps=tuple(gaps),
        )
        _log(built)
        return built


def load_grammars(
    plugins: Plugins, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]
) -> GrammarCache | None:
    """Compiled grammars for a vocabulary, through whichever plugin comes last; None without a tokenizer or plugin."""
    if tokenizer is None:
        return None
    vocabulary = Vocabulary(tokenizer=tokenizer, vocab_size=vocab_size, end_token_ids=end_token_ids)
    compiler: GrammarCompiler | None = None
    for plugin, offer in plugins.ask("headrace_structured_output", vocabulary=vocabulary):
        if callable(getattr(offer, "compile", None)):
            compiler = offer
        else:
            plugins.refuse(plugin, Status.BROKEN, "headrace_structured_output must return a compiler of grammars")
    return None if compiler is None else GrammarCache(compiler)


def load_params(
    config: EngineConfig,
    model: Model,
    dtype: str,
    load: Callable[[ParamSource], None],
    device: Device,
) -> None:
    """Give the model's weights, or random ones, quantized for a device if that is asked for, to `load`."""
    if model.spec.foreign is not None:
        _load_foreign(config, model, dtype, load)
        return
    params, quantization = declare_params(without_adapters(model.spec)), config.model.quantize

    def load_quantized(source: ParamSource) -> None:
        if quantization != "none":
            source = QuantizedParams(source, quantization, device.caps, device.quantizer())
        load(AdapterParams(source, model.spec, model.adapters) if model.spec.adapters is not None else source)

    if config.model.load_format == "dummy":
        load_quantized(DummyParams(params, seed=config.scheduler.seed, dtype=dtype))
        return
    pickle = config.model.allow_pickle
    source: WeightSource
    source = UnstackedSource(model.gguf) if model.gguf else open_weights(model.path, allow_pickle=pickle)
    if quantization_config := model.config.quantization():
        keep_codes = config.model.dtype == "auto" or quantization != "none"
        source = DecodedSource(source, quantization_config, keep_codes=keep_codes)
    if folders := dense_folders(model.spec):
        parts = {f"{name}.": open_weights(model.path / name, allow_pickle=pickle) for name in folders}
        source = JoinedSource({"": source, **parts})
    try:
        load_quantized(CheckpointParams(params, source, model.names))
    finally:
        source.close()


def _load_foreign(config: EngineConfig, model: Model, dtype: str, load: Callable[[ParamSource], None]) -> None:
    """Give the module of a model of no family to `load`."""
    from ..foreign.module import ForeignParams

    assert model.spec.foreign is not None
    seed = config.scheduler.seed if config.model.load_format == "dummy" else None
    pickle = config.model.allow_pickle
    load(ForeignParams(model.spec.foreign, model.path, dtype=dtype, seed=seed, allow_pickle=pickle))


def _processors(plugins: Plugins) -> ProcessorFactories:
    return {name: factory for name, (_, factory) in plugins.factories("headrace_logits_processors").items()}


def _ops_choice(selections: Sequence[Selection]) -> list[Choice]:
    """Which providers serve how many ops, and why others declined; nothing for a runner without a table of ops."""
    if not selections:
        return []
    counts = Counter(selection.provider for selection in selections)
    reasons = dict.fromkeys(
        f"{name} not: {reason}" for selection in selections for name, reason in selection.declined
    )
    served = ", ".join(f"{count} by {name}" for name, count in counts.most_common())
    return [Choice(name="ops", value=served, reason="; ".join(reasons) or "headrace doctor --ops lists them")]


def _lora_choice(model: Model, device: Device, dtype: str) -> list[Choice]:
    if model.spec.adapters is None:
        return []
    size = sum(device.packed_bytes(param.shape, dtype) for param in adapter_params(model.spec))
    names = ", ".join(adapter.files.name for adapter in model.adapters) or "none yet"
    places = f"{model.spec.adapters.num_adapters} places, {format_bytes(size)} of the weights"
    return [Choice(name="lora", value=names, reason=places)]


def _speculation_choice(config: EngineConfig, caps: Caps) -> list[Choice]:
    name, count = parse_speculative(config.scheduler.speculative)
    if not name:
        return []
    waits = "; each step waits for the one before, whose tokens it guesses from" if caps.depth else ""
    reason = f"up to {count} tokens a request and step, while few requests run{waits}"
    return [Choice(name="speculative", value=name, reason=reason)]


def _log(built: Built) -> None:
    for choice in built.choices:
        logger.info("%s=%s (%s)", choice.name, choice.value, choice.reason)
    for gap in built.gaps:
        remedy = f"; try {gap.remedy}" if gap.remedy else ""
        logger.warning("%s: %s (%s)%s", gap.feature, gap.reason, gap.effect, remedy)
