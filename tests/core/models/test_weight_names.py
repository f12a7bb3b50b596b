"""No mistake in the names or shapes of a checkpoint passes in silence: each tensor in turn is taken out, joined by a
misspelled twin, and given another shape, and the error names it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import encoder_cases
import golden_cases
import paged_model
from headrace.core.errors import WeightError
from headrace.core.models.config import read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.heads import with_default_pooler, with_head_names
from headrace.core.models.name_tables import checkpoint_names
from headrace.core.models.registry import family_of
from headrace.core.weights.decoded import DecodedSource
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.names import NameTable
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor, TensorInfo, WeightSource
from paged_seq2seq import SEQ2SEQ_CASES, make_seq2seq
from vision_cases import VISION_CASES, VisionOracle

pytestmark = pytest.mark.usefixtures("one_thread")


class Damaged:
    """A checkpoint without some tensors, with others under names that nothing has, or of other shapes."""

    def __init__(
        self,
        source: WeightSource,
        *,
        without: Sequence[str] = (),
        twins: Mapping[str, str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.source, self.without, self.twins, self.shapes = source, set(without), twins or {}, shapes or {}

    def names(self) -> Sequence[str]:
        return [name for name in self.source.names() if name not in self.without] + list(self.twins)

    def info(self, name: str) -> TensorInfo:
        info = self.source.info(self.twins.get(name, name))
        return replace(info, name=name, shape=self.shapes.get(name, info.shape))

    def read(self, name: str) -> HostTensor:
        return self.source.read(self.twins.get(name, name))

    def close(self) -> None:
        self.source.close()


def decoder(name: str) -> Callable[[Path], None]:
    cases = (*golden_cases.FIRST, *golden_cases.CASES, *golden_cases.FLAGS)
    case = next(case for case in cases if case.name == name)
    return lambda folder: void(paged_model.make_checkpoint(case, folder))


def encoder(name: str, auto: str = "AutoModelForSequenceClassification") -> Callable[[Path], None]:
    case = next(case for case in encoder_cases.CASES if case.name == name)
    return lambda folder: void(encoder_cases.make_checkpoint(case, folder, auto))


def seq2seq(name: str) -> Callable[[Path], None]:
    case = next(case for case in SEQ2SEQ_CASES if case.name == name)
    return lambda folder: void(make_seq2seq(case, folder))


def vision(name: str) -> Callable[[Path], None]:
    case = next(case for case in VISION_CASES if str(case) == name)
    return lambda folder: void(VisionOracle(case, folder))


def quantized(folder: Path) -> None:
    """Llama as GPTQ stores it: groups of 32 in 4 bits."""
    import torch
    from safetensors.torch import load_file, save_file

    decoder("llama")(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, cols = tensors.pop(name).shape
        stem, groups = name.removesuffix("weight"), -(-cols // 32)
        tensors[f"{stem}qweight"] = torch.zeros(cols // 8, rows, dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.zeros(groups, rows // 8, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(groups, rows, dtype=torch.float16)
        tensors[f"{stem}g_idx"] = torch.arange(cols, dtype=torch.int32) // 32
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    (folder / "config.json").write_text(json.dumps(config))


def void(_: object) -> None:
    """Forgets what a maker returns."""


CHECKPOINTS: Mapping[str, tuple[Callable[[Path], None], str | tuple[str, ...]]] = {
    "llama_tied": (decoder("llama_tied"), ""),
    "gpt2": (decoder("gpt2"), ""),
    "deepseek_v3": (decoder("deepseek_v3"), ""),
    "gpt_oss": (decoder("gpt_oss"), ""),
    "mixtral": (decoder("mixtral"), ""),
    "falcon_h1": (decoder("falcon_h1"), ""),
    "kimi_linear": (decoder("kimi_linear"), ""),
    "roberta": (encoder("roberta"), ""),
    "modernbert": (encoder("modernbert"), ""),
    "bart": (seq2seq("bart"), "final_logits_bias"),
    "t5": (seq2seq("t5"), ""),
    "whisper": (seq2seq("whisper"), ""),
    "gptq": (quantized, ".g_idx"),
    "gemma3": (vision("gemma3"), "lm_head.weight"),
    "qwen3_vl_moe": (vision("qwen3_vl_moe"), "lm_head.weight"),
    "internvl": (vision("internvl"), ("mask_token", "lm_head.weight")),
}
"""Checkpoint -> how it is made, and how names end that it may do without: a bias of zeros, the order of groups as
they come, what a model is only trained with, and, inside multimodal checkpoints, a head (`wrappers.text_names`)."""


class Loader:
    """What loads the checkpoint of a folder, as an engine does."""

    def __init__(self, folder: Path) -> None:
        self.source, config = open_weights(folder), read_config(folder)
        family = family_of(config)
        spec = with_default_pooler(family.to_spec(config), config)
        self.names = with_head_names(checkpoint_names(family.weights, spec), spec)
        self.params, self.quantization = declare_params(spec), config.quantization()

    def problems(self, **damage: Any) -> str:
        """What is said of the checkpoint with some damage; nothing if it is taken."""
        source: WeightSource = Damaged(self.source, **damage)
        try:
            if self.quantization:
                source = DecodedSource(source, self.quantization, keep_codes=True)
            CheckpointParams(self.params, source, self.names)
        except WeightError as error:
            return str(error)
        return ""


QUICK = ("gpt2", "deepseek_v3", "modernbert", "t5", "gptq", "internvl")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]
)
def test_each_tensor_is_missed_told_from_its_twin_and_measured(name: str, tmp_path: Path) -> None:
    make, spare = CHECKPOINTS[name]
    make(tmp_path)
    loader = Loader(tmp_path)
    assert loader.problems() == ""
    for tensor in loader.source.names():
        if ".head." in tensor and "vision_tower" in tensor:  # SigLIP's own pooler, a module that is left out
            continue
        stem, _, leaf = tensor.rpartition(".")
        found = loader.problems(without=[tensor])
        assert is_named(tensor, found, loader.names) != bool(spare and tensor.endswith(spare)), (
            f"without {tensor}: {found}"
        )
        twin = f"{stem}.misspelled_{leaf}"
        assert twin in loader.problems(twins={twin: tensor}), twin
        shape = loader.source.info(tensor).shape
        found = loader.problems(shapes={tensor: (shape[0] + 1, *shape[1:]) if shape else (2,)})
        assert is_named(tensor, found, loader.names) or tensor.endswith("mask_token"), (
            f"{tensor} of another shape: {found}"
        )
    loader.source.close()


def is_named(tensor: str, error: str, names: NameTable) -> bool:
    """True if an error names a tensor, as the file spells it or as it is looked for."""
    renamed = tensor
    for pattern, new in names.renames:
        renamed = re.sub(pattern, new, renamed)
    stem, _, leaf = renamed.rpartition(".")
    return any(name in error for name in (tensor, renamed, f"{stem}.weight"))
