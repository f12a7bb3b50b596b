"""Tiny vision-language checkpoints made by transformers: weights, image processors, pictures, and what it answers."""

import base64
import copy
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paged_model import randomise
from tiny_tokenizers import train_byte_level

NUM_TOKENS = 6
IMAGE_TOKEN = 129
SPLIT = 128
"""Stands between the tiles of an image where a family has something there."""
TEXT: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 7,
    "image_size": 28,
}  # fmt: skip
QWEN_TOWER: Mapping[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 7, "in_channels": 3}
SQUARE: Mapping[str, Any] = {"size": {"height": 28, "width": 28}}
PIXTRAL: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 7,
    "image_size": 56, "head_dim": 16,
}  # fmt: skip
PINPOINTS: Mapping[str, Any] = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 84]]}
TILES: Mapping[str, Any] = {**SQUARE, "crop_to_patches": True, "max_patches": 4}
MROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class VisionCase:
    """One tiny checkpoint. text, vision, config: keys of its config; processor: image processor and its settings.

    least_budget: of a step's tokens, where an image, or a prompt, must fit in one step. by_prompt: an image that is
    alone in a prompt is cut into tiles, several are not. is_crossed: images are read by cross attention.
    """

    model_type: str
    text_type: str
    vision_type: str
    processor: str
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepared: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    least_budget: int = 1
    by_prompt: bool = False
    is_crossed: bool = False
    token_types: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] = lambda ids: {}

    def __str__(self) -> str:
        return self.name or self.model_type


def _image_types(ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"token_type_ids": (ids == IMAGE_TOKEN).long()}


def _mm_types(ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}


def _prefix_types(ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"token_type_ids": torch.zeros_like(ids)}


LLAVA: Mapping[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
GEMMA3: Mapping[str, Any] = {
    "head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
QWEN_SETTINGS: Mapping[str, Any] = {
    "patch_size": 7, "merge_size": 2, "size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 30},
}  # fmt: skip
VISION_CASES = (
    VisionCase("llava", "llama", "clip_vision_model", "LlavaImageProcessorPil", settings=LLAVA),
    VisionCase(
        "llava",
        "qwen2",
        "siglip_vision_model",
        "SiglipImageProcessorPil",
        settings=SQUARE,
        config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "silu"},
        name="llava_siglip_qwen2",
    ),
    VisionCase(
        "llava", "llama", "clip_vision_model", "LlavaImageProcessorPil", settings=LLAVA,
        config={"vision_feature_layer": [-1, 1, -2]}, name="llava_layers",
    ),
    VisionCase(
        "llava", "llama", "clip_vision_model", "LlavaImageProcessorPil", settings=LLAVA,
        config={"vision_feature_select_strategy": "full"}, name="llava_class",
    ),
    VisionCase(
        "llava", "llama", "siglip_vision_model", "SiglipImageProcessorPil", settings=SQUARE,
        config={"vision_feature_layer": -1}, name="llava_siglip_default",
    ),
    VisionCase(
        "vipllava", "llama", "clip_vision_model", "CLIPImageProcessorPil", settings=LLAVA,
        config={"vision_feature_layer": [-1, 1], "projector_layernorm_eps": 1e-3},
    ),
    VisionCase(
        "deepseek_vl", "llama", "siglip_vision_model", "DeepseekVLImageProcessorPil",
        settings={"size": {"height": 28, "width": 28}, "min_size": 7},
    ),
    VisionCase(
        "llava_next_video", "llama", "clip_vision_model", "LlavaNextImageProcessorPil",
        config=PINPOINTS, settings={**LLAVA, **PINPOINTS},
    ),
    VisionCase(
        "paligemma",
        "gemma",
        "siglip_vision_model",
        "SiglipImageProcessorPil",
        text={"head_dim": 16},
        vision={"projection_dim": 64},
        config={"projection_dim": 64},
        settings=SQUARE,
        least_budget=256,
        token_types=_prefix_types,
    ),
    VisionCase(
        "gemma3",
        "gemma3_text",
        "siglip_vision_model",
        "Gemma3ImageProcessorPil",
        text=GEMMA3,
        vision={"image_size": 56},
        config={"mm_tokens_per_image": 16},
        settings={"size": {"height": 56, "width": 56}},
        least_budget=16,
        token_types=_image_types,
    ),
    VisionCase(
        "idefics3",
        "llama",
        "idefics3_vision",
        "Idefics3ImageProcessorPil",
        settings={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        prepared={"return_row_col_info": True},
    ),
    VisionCase(
        "smolvlm",
        "llama",
        "smolvlm_vision",
        "SmolVLMImageProcessorPil",
        text={"tie_word_embeddings": True},
        config={"tie_word_embeddings": True},
        settings={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        prepared={"return_row_col_info": True},
    ),
    VisionCase(
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen2_vl_vision",
        "Qwen2VLImageProcessorPil",
        text={"rope_parameters": MROPE},
        vision={**QWEN_TOWER, "embed_dim": 32, "hidden_size": 64},
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_5_vl_vision",
        "Qwen2VLImageProcessorPil",
        text={"rope_parameters": MROPE},
        vision={**QWEN_TOWER, "out_hidden_size": 64, "window_size": 28, "fullatt_block_indexes": [1]},
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "qwen3_vl",
        "qwen3_vl_text",
        "qwen3_vl_vision",
        "Qwen2VLImageProcessorPil",
        text={"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16},
        vision={
            **QWEN_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
        },
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_moe_vision",
        "Qwen2VLImageProcessorPil",
        text={
            "rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        vision={
            **QWEN_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [1],
        },
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_vision",
        "Qwen2VLImageProcessorPil",
        text={
            "rope_parameters": {
                **MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5,
            },
            "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        vision={**QWEN_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16},
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "glm4v",
        "glm4v_text",
        "glm4v_vision",
        "Glm4vImageProcessorPil",
        text={"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}, "head_dim": 16},
        vision={**QWEN_TOWER, "out_hidden_size": 64},
        settings={**QWEN_SETTINGS, "size": {"shortest_edge": 14 * 14 * 2 * 4, "longest_edge": 14 * 14 * 2 * 30}},
        token_types=_mm_types,
    ),
    VisionCase(
        "glm46v",
        "glm4v_text",
        "glm4v_vision",
        "Glm46VImageProcessorPil",
        text={"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}, "head_dim": 16},
        vision={**QWEN_TOWER, "out_hidden_size": 64},
        settings={**QWEN_SETTINGS, "size": {"shortest_edge": 14 * 14 * 2 * 4, "longest_edge": 14 * 14 * 2 * 30}},
        token_types=_mm_types,
    ),
    VisionCase(
        "glm4v_moe",
        "glm4v_moe_text",
        "glm4v_moe_vision",
        "Glm4vImageProcessorPil",
        text={
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}, "head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        },
        vision={**QWEN_TOWER, "out_hidden_size": 64},
        settings={**QWEN_SETTINGS, "size": {"shortest_edge": 14 * 14 * 2 * 4, "longest_edge": 14 * 14 * 2 * 30}},
        token_types=_mm_types,
    ),
    VisionCase(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_moe_vision",
        "Qwen2VLImageProcessorPil",
        text={
            "rope_parameters": {
                **MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5,
            },
            "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
        vision={**QWEN_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16},
        settings=QWEN_SETTINGS,
        token_types=_mm_types,
    ),
    VisionCase(
        "llava",
        "mistral",
        "pixtral",
        "PixtralImageProcessorPil",
        vision=PIXTRAL,
        config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        settings={"size": {"longest_edge": 42}, "patch_size": {"height": 7, "width": 7}},
        name="pixtral",
    ),
    VisionCase(
        "mistral3",
        "mistral",
        "pixtral",
        "PixtralImageProcessorPil",
        vision=PIXTRAL,
        settings={"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
    ),
    VisionCase(
        "llava_next",
        "mistral",
        "clip_vision_model",
        "LlavaNextImageProcessorPil",
        config=PINPOINTS,
        settings={**LLAVA, **PINPOINTS},
    ),
    VisionCase(
        "llava_onevision",
        "qwen2",
        "siglip_vision_model",
        "LlavaOnevisionImageProcessorPil",
        config={**PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
        settings={**SQUARE, **PINPOINTS},
        by_prompt=True,
    ),
    VisionCase(
        "internvl",
        "qwen2",
        "internvl_vision",
        "GotOcr2ImageProcessorPil",
        vision={"image_size": [28, 28], "patch_size": [7, 7]},
        settings=TILES,
    ),
    VisionCase(
        "internvl",
        "qwen3",
        "internvl_vision",
        "GotOcr2ImageProcessorPil",
        text={"head_dim": 16},
        vision={
            "image_size": [28, 28], "patch_size": [7, 7], "use_qk_norm": True, "norm_type": "rms_norm",
            "attention_bias": True,
        },
        settings=TILES,
        name="internvl_rms_norm",
    ),
    VisionCase(
        "cohere2_vision",
        "cohere2",
        "siglip_vision_model",
        "GotOcr2ImageProcessorPil",
        text={"sliding_window": 24, "tie_word_embeddings": True, "logit_scale": 1.0},
        config={"alignment_intermediate_size": 48},
        settings=TILES,
    ),
    VisionCase(
        "aya_vision",
        "cohere2",
        "siglip_vision_model",
        "GotOcr2ImageProcessorPil",
        text={"sliding_window": 24, "tie_word_embeddings": True, "logit_scale": 1.0},
        config={"alignment_intermediate_size": 48},
        settings=TILES,
    ),
    VisionCase(
        "llama4",
        "llama4_text",
        "llama4_vision_model",
        "GotOcr2ImageProcessorPil",
        text={
            "head_dim": 16, "intermediate_size_mlp": 80, "attention_chunk_size": 512, "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
        vision={
            "intermediate_size": 128, "projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48,
        },
        settings=TILES,
    ),
    VisionCase(
        "mllama",
        "mllama_text_model",
        "mllama_vision_model",
        "MllamaImageProcessorPil",
        text={"num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
        vision={"num_global_layers": 2, "intermediate_layers_indices": [0, 2], "vision_output_dim": 96},
        settings={**SQUARE, "max_image_tiles": 4},
        is_crossed=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class VisionPrompt:
    """Token ids with room for the rows of pictures, and the pictures."""

    token_ids: list[int]
    pictures: list[Image.Image]


class VisionOracle:
    """transformers' model and image processor over one folder."""

    def __init__(self, case: VisionCase, folder: Path) -> None:
        import transformers
        from transformers import AutoConfig, AutoModelForImageTextToText
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        text = {key: size for key, size in TEXT.items() if key not in case.text}
        config = AutoConfig.for_model(
            case.model_type,
            text_config={"model_type": case.text_type, **text, **case.text},
            vision_config={"model_type": case.vision_type, **TOWER, **case.vision},
            **{"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, **case.config},
        )
        auto: Any = AutoModelForImageTextToText
        self.case = case
        output: Any = MoeCausalLMOutputWithPast
        output.image_outputs = None  # Llama 4's forward reads it
        model: Any = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
        randomise(model)
        model.save_pretrained(folder)
        eager = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
        self.model: Any = auto.from_pretrained(folder, **eager, dtype=torch.float32).eval()
        self._wide = copy.deepcopy(self.model).double()
        self.processor: Any = getattr(transformers, case.processor)(**case.settings)
        self.processor.save_pretrained(folder)

    def prompt(self, *pieces: int | Image.Image, seed: int = 0) -> VisionPrompt:
        """Random tokens, so many for each number, and the rows of pictures."""
        random = np.random.default_rng(seed)
        token_ids, pictures = [1], []
        for piece in pieces:
            if isinstance(piece, int):
                token_ids += random.integers(3, 120, piece).tolist()
                continue
            for tile in self._rows(piece, alone=sum(not isinstance(other, int) for other in pieces) == 1):
                token_ids += [*[IMAGE_TOKEN] * tile, SPLIT]
            pictures.append(piece)
        return VisionPrompt(token_ids, pictures)

    def _rows(self, picture: Image.Image, *, alone: bool) -> list[int]:
        """Rows of each tile. alone: no other picture is in the prompt."""
        if self.case.is_crossed:
            return [1]
        made = self._inputs([picture])
        if self.case.by_prompt and not alone:
            whole: int = self.model.config.vision_config.image_size // self.model.config.vision_config.patch_size
            return [whole**2 + 1]
        model = getattr(self.model, "model", self.model)
        with torch.inference_mode():
            out = model.get_image_features(**{k: v for k, v in made.items()})
        found = out.last_hidden_state if out.pooler_output is None else out.pooler_output
        count = sum(rows.shape[0] if rows.dim() == 2 else rows.shape[0] * rows.shape[1] for rows in _as_list(found))
        tiles = made["pixel_values"].shape[1] if "pixel_attention_mask" in made else 1
        return [count // tiles] * tiles

    def _inputs(self, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        if not pictures:
            return {}
        given = [list(pictures)] if self.case.prepared or self.case.is_crossed else list(pictures)
        keys = {"pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "batch_num_images"}
        keys |= {"aspect_ratio_ids", "aspect_ratio_mask"}
        if not self.case.by_prompt or len(given) == 1:
            made = self.processor(images=given, return_tensors="np")
        else:
            made = self.processor(images=[given], return_tensors="np")
        return {key: torch.from_numpy(np.asarray(made[key])) for key in keys if key in made}

    def logprobs(self, prompt: VisionPrompt) -> torch.Tensor:
        """Log probabilities of each token of the prompt but the first, [num_tokens - 1], in float64: the error of
        transformers in float32 is as large as ours, and larger behind an encoder."""
        ids, inputs = torch.tensor([prompt.token_ids]), self._inputs(prompt.pictures)
        wide = {name: array.double() if array.is_floating_point() else array for name, array in inputs.items()}
        with torch.inference_mode():
            logits = self._wide(input_ids=ids, **wide, **self._types(ids, prompt)).logits[0].float()
        logprobs: torch.Tensor = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logprobs

    def answer(self, prompt: VisionPrompt) -> list[int]:
        """Greedy tokens."""
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                **self._inputs(prompt.pictures),
                **self._types(ids, prompt),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    def _types(self, ids: torch.Tensor, prompt: VisionPrompt) -> Mapping[str, torch.Tensor]:
        if not self.case.is_crossed or not prompt.pictures:
            return self.case.token_types(ids)
        from transformers.models.mllama import processing_mllama as mllama

        num_tiles = self.processor(images=[prompt.pictures], return_tensors="np")["num_tiles"]
        seen = [mllama.get_cross_attention_token_mask(prompt.token_ids, IMAGE_TOKEN)]
        mask = mllama.convert_sparse_cross_attention_mask_to_dense(seen, num_tiles, 4, ids.shape[1])
        return {"cross_attention_mask": torch.from_numpy(mask)}


def check_images(case: VisionCase, folder: Path) -> float:
    """The largest error of log probabilities of prompts with images, over their standard deviation."""
    from headrace import LLM, SamplingParams

    oracle = VisionOracle(case, folder)
    first, second = picture(1), picture(2, 60, 60)
    prompts = [oracle.prompt(5, first, 7), oracle.prompt(3, first, 4, second, 6, first, 2)]
    given: list[Any] = [{"prompt_token_ids": p.token_ids, "multi_modal_data": {"image": p.pictures}} for p in prompts]
    params, worst = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True), 0.0
    options: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, kv_memory="8MiB")
    with LLM(str(folder), device="reference", max_num_batched_tokens=max(16, case.least_budget), **options) as llm:
        outputs = llm.generate(given, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        pairs = zip(output.prompt_logprobs or (), prompt.token_ids, strict=True)
        got = torch.tensor([entry[token].logprob for entry, token in pairs if entry is not None])
        want = oracle.logprobs(prompt)
        worst = max(worst, float((got - want).abs().max() / want.std()))
    return worst


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A picture whose pixels are random."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _as_list(found: Any) -> Sequence[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_model(folder: Path) -> VisionOracle:
    """A tiny LLaVA with tokenizer and chat template."""
    backend = train_byte_level()
    backend.add_special_tokens(["<image>"])
    token, size = backend.token_to_id("<image>"), backend.get_vocab_size()
    case = VisionCase(
        "llava",
        "llama",
        "clip_vision_model",
        "LlavaImageProcessorPil",
        text={"vocab_size": size},
        config={"image_token_id": token, "image_token_index": token},
        settings=LLAVA,
    )
    oracle = VisionOracle(case, folder)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return oracle


def data_url(image: Image.Image) -> str:
    """A picture as clients send it."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
