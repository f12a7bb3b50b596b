"""A model of no family as transformers makes it: on shapes alone for its spec, with its weights for a runner."""

import contextlib
import inspect
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ..errors import ModelError, WeightError
from ..models.config import HFConfig
from ..models.params import Param
from ..models.registry import unknown_family
from ..models.spec import ForeignSpec, LayerSpec, ModelSpec, NormSpec
from ..weights.source import LoadedParam
from .attention import NAME, PROBE, Probe

_PROBE_TOKENS = 3
_DEFAULT_LENGTH = 2048
"""Positions of a model whose config names no limit."""
_ROPES_BY_BATCH = ("dynamic", "longrope")


def read_foreign_spec(config: HFConfig, folder: Path, *, trust_remote_code: bool) -> ModelSpec:
    """The spec of a model that transformers' own code computes. Raises ModelError that says why it cannot."""
    why = f"model_type {config.model_type!r} is of no family here, and transformers' own code cannot serve it"
    if config.get("auto_map") and config.model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise ModelError(
            f"model_type {config.model_type!r} is of no family here, and its own code is part of its folder",
            remedies=["HEADRACE_TRUST_REMOTE_CODE=1, which runs that code with all rights of this process"],
        )
    if config.model_type not in CONFIG_MAPPING and not config.get("auto_map"):
        raise unknown_family(config.model_type, f"transformers {transformers.__version__} does not know it either")
    try:
        with _quietly():
            theirs = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            _check_config(theirs)
            probe, module = _probe(theirs, trust_remote_code)
            _check_module(theirs, probe, module)
    except Exception as error:
        reason = error.reason if isinstance(error, ModelError) else _told(error)
        raise ModelError(f"{why}: {reason}", remedies=["take a model of a family in docs/models.md"]) from error
    text = theirs.get_text_config()
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or _DEFAULT_LENGTH,
        layers=tuple(LayerSpec(attn=attn) for attn in probe.layers),
        norm=NormSpec(),
        dtype=config.dtype,
        foreign=ForeignSpec(
            attention=tuple(probe.called),
            params=tuple(_declare(module)),
            keeps_logits="logits_to_keep" in inspect.signature(module.forward).parameters,
            trust_remote_code=trust_remote_code,
        ),
    )


class ForeignParams:
    """A ParamSource whose parameters come all at once, in the module that computes with them."""

    def __init__(
        self, spec: ForeignSpec, folder: Path, *, dtype: str, seed: int | None = None, allow_pickle: bool = False
    ) -> None:
        """seed: of random weights, without a checkpoint; None reads the folder's."""
        self._spec, self._folder, self._dtype = spec, folder, dtype
        self._seed, self._allow_pickle = seed, allow_pickle

    def params(self) -> Sequence[Param]:
        """All declarations."""
        return self._spec.params

    def __iter__(self) -> Iterator[LoadedParam]:
        """None: `module` has them."""
        return iter(())

    def module(self) -> torch.nn.Module:
        """The model with its weights in host memory. Raises WeightError for missing, extra or mis-shaped tensors."""
        options: dict[str, Any] = {
            "attn_implementation": NAME,
            "dtype": getattr(torch, self._dtype),
            "trust_remote_code": self._spec.trust_remote_code,
        }
        auto: Any = AutoModelForCausalLM
        with _quietly():
            if self._seed is not None:
                config = AutoConfig.from_pretrained(self._folder, trust_remote_code=self._spec.trust_remote_code)
                torch.manual_seed(self._seed)
                random: torch.nn.Module = auto.from_config(config, **options)
                return random.eval()
            try:
                module, found = auto.from_pretrained(
                    self._folder,
                    output_loading_info=True,
                    use_safetensors=None if self._allow_pickle else True,
                    **options,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise WeightError(f"{self._folder}: {_first_line(error)}", file=str(self._folder)) from error
        problems = {
            "missing": found["missing_keys"],
            "unexpected": found["unexpected_keys"],
            "mis-shaped": [key[0] for key in found["mismatched_keys"]],
        }
        texts = [f"{what}: {', '.join(sorted(names)[:5])}" for what, names in problems.items() if names]
        if texts:
            raise WeightError(f"{self._folder}: tensors are {'; '.join(texts)}", file=str(self._folder))
        loaded: torch.nn.Module = module
        return loaded.eval()


def call(module: torch.nn.Module, input_ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of one forward pass over a flat batch: [num_tokens] each -> [num_tokens, vocab_size]."""
    output = module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **options)
    logits: torch.Tensor = output.logits[0]
    return logits


def _check_config(config: Any) -> None:
    """Refuse by the config alone what cannot be computed token by token from keys and values."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("it has an encoder and a decoder")
    if getattr(config, "quantization_config", None):
        raise ModelError("its weights are quantized")
    if type(config) not in AutoModelForCausalLM._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError("transformers knows no decoder of this type")
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    if by_batch := [kind for kind in kinds if kind in _ROPES_BY_BATCH]:
        raise ModelError(f"its rope {by_batch[0]!r} depends on the longest request of a batch")


def _probe(config: Any, trust_remote_code: bool) -> tuple[Probe, torch.nn.Module]:
    """Run the model on shapes alone."""
    auto: Any = AutoModelForCausalLM
    probe = Probe()
    with torch.device("meta"):
        module: torch.nn.Module = auto.from_config(
            config,
            attn_implementation=PROBE,
            experts_implementation="batched_mm",
            trust_remote_code=trust_remote_code,
        )
        probe.names = {id(part): name for name, part in module.named_modules()}
        ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64)
        with torch.inference_mode():
            # With a mask of ones nothing asks for values that are not there.
            call(module.eval(), ids, ids, attention_mask=torch.ones((1, _PROBE_TOKENS), dtype=torch.int64))
    return probe, module


def _check_module(config: Any, probe: Probe, module: torch.nn.Module) -> None:
    """Every layer must have attended through the interface, and nothing else may look at other tokens."""
    num_layers = config.get_text_config().num_hidden_layers
    if len(probe.called) != num_layers:
        raise ModelError(
            f"{len(probe.called)} of its {num_layers} layers attend through transformers' attention interface"
        )
    if getattr(module, "_is_stateful", False):
        raise ModelError("it keeps states of a recurrence")


def _declare(module: torch.nn.Module) -> Iterator[Param]:
    for name, tensor in module.named_parameters():
        if tensor.dim() < 2:
            yield Param(name=name, shape=tuple(tensor.shape), kind="vector")
        else:
            yield Param(name=name, shape=(tensor.numel() // tensor.shape[-1], tensor.shape[-1]), kind="linear")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bars and remarks: what matters is raised."""
    logs: Any = transformers.logging
    verbosity, had_bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(verbosity)
        if had_bars:
            logs.enable_progress_bar()


def _told(error: Exception) -> str:
    """Why transformers' code failed on shapes alone."""
    if "meta tensor" in str(error) or "data-dependent" in str(error):
        return "what its layers do depends on the numbers that they compute, so that shapes alone do not show it"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
