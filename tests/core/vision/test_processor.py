"""Prompts with images, against the checkpoints' own processors, and images that cannot be used."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

from headrace.core.errors import RequestError
from headrace.core.models.spec import ModelSpec, NormSpec
from headrace.core.models.vision_spec import ProjectorSpec, VisionSpec
from headrace.core.text.tokenizer import Tokenizer, TokenizerInfo
from headrace.core.vision.images import ImageLimits, read_image, take_images
from headrace.core.vision.processor import ImageReader
from headrace.core.vision.styles import style_of
from tiny_tokenizers import train_byte_level
from vision_cases import LLAVA, PINPOINTS, QWEN_SETTINGS, SQUARE, data_url, picture

TOKENS = [
    "<image>", "<bos>", "<image_soft_token>", "<start_of_image>", "<end_of_image>", "<|image_pad|>", "<|video_pad|>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
    "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<|START_OF_IMG|>",
    "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 6)),
    "TILE",
]  # fmt: skip


def make_tokenizer() -> tokenizers.Tokenizer:
    backend = train_byte_level()
    backend.add_special_tokens(TOKENS)
    return backend


def make_reader(
    folder: Path, model_type: str, token: str, merge: int, patch_size: int = 7, **fields: Any
) -> ImageReader:
    backend = make_tokenizer()
    encoder = ModelSpec(
        model_type="pixtral" if model_type == "mistral3" else "vit",
        vocab_size=0,
        hidden_size=8,
        max_position_embeddings=0,
        layers=(),
        norm=NormSpec(),
        num_learned_positions=16,
    )
    vision = VisionSpec(
        encoder=encoder,
        projector=ProjectorSpec(dense=()),
        image_token_id=int(backend.token_to_id(token) or 0),
        patch_size=patch_size,
        merge=merge,
        **fields,
    )
    info = TokenizerInfo(special_tokens={"bos_token": "<bos>"})
    return ImageReader(
        folder=folder,
        model_type=model_type,
        vision=vision,
        tokenizer=Tokenizer(backend, info),
        limits=ImageLimits(max_images=2, max_bytes=20_000, max_pixels=10_000, allow_files=False, allow_remote=False),
    )


def their_processor(name: str, image_processor: Any, **options: Any) -> Any:
    import transformers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=make_tokenizer(), bos_token="<bos>", pad_token="<bos>", **options.pop("tokens", {})
    )
    return getattr(transformers, name)(image_processor, tokenizer, **options)


CROPS: dict[str, Any] = {
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.5,
}  # fmt: skip
CASES: dict[str, tuple[str, str, str, str, int, dict[str, Any], dict[str, Any], str]] = {
    "llava": (
        "llava", "<image>", "LlavaImageProcessorPil", "LlavaProcessor", 1, dict(LLAVA),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, "<image>",
    ),
    "gemma3": (
        "gemma3", "<image_soft_token>", "Gemma3ImageProcessorPil", "Gemma3Processor", 2, dict(SQUARE),
        {
            "image_seq_length": 4,
            "tokens": {
                "extra_special_tokens": {
                    "image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                    "eoi_token": "<end_of_image>",
                }
            },
        },
        "<start_of_image>",
    ),
    "gemma3_crops": (
        "gemma3", "<image_soft_token>", "Gemma3ImageProcessorPil", "Gemma3Processor", 2, {**SQUARE, **CROPS},
        {
            "image_seq_length": 4,
            "tokens": {
                "extra_special_tokens": {
                    "image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                    "eoi_token": "<end_of_image>",
                }
            },
        },
        "<start_of_image>",
    ),
    "idefics3": (
        "idefics3", "<image>", "Idefics3ImageProcessorPil", "Idefics3Processor", 2,
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, {"image_seq_len": 4}, "<image>",
    ),
    "llava_next": (
        "llava_next", "<image>", "LlavaNextImageProcessorPil", "LlavaNextProcessor", 1, {**LLAVA, **PINPOINTS},
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, "<image>",
    ),
    "internvl": (
        "internvl", "<IMG_CONTEXT>", "GotOcr2ImageProcessorPil", "InternVLProcessor", 2, dict(SQUARE),
        {
            "image_seq_length": 4,
            "tokens": {
                "extra_special_tokens": {
                    "start_image_token": "<img>", "end_image_token": "</img>",
                    "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
                }
            },
        },
        "<IMG_CONTEXT>",
    ),
    "cohere2_vision": (
        "cohere2_vision", "<|IMG_PATCH|>", "GotOcr2ImageProcessorPil", "Cohere2VisionProcessor", 2,
        {**SQUARE, "crop_to_patches": True},
        {
            "tokens": {
                "extra_special_tokens": {
                    "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
                    "img_line_break_token": "<|IMG_LINE_BREAK|>",
                }
            },
        },
        "<|IMG_PATCH|>",
    ),
    "aya_vision": (
        "aya_vision", "<|IMG_PATCH|>", "GotOcr2ImageProcessorPil", "AyaVisionProcessor", 2,
        {**SQUARE, "crop_to_patches": True}, {"patch_size": 7, "img_size": 28, "downsample_factor": 2}, "<image>",
    ),
    "paligemma": (
        "paligemma", "<image>", "SiglipImageProcessorPil", "PaliGemmaProcessor", 1, dict(SQUARE), {}, "<image>",
    ),
    "qwen2_vl": (
        "qwen2_vl", "<|image_pad|>", "Qwen2VLImageProcessorPil", "Qwen2VLProcessor", 2, dict(QWEN_SETTINGS), {},
        "<|image_pad|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_the_processor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    # Qwen's wants a processor of films, which needs torchvision.
    mixin: Any = transformers.ProcessorMixin
    monkeypatch.setattr(mixin, "check_argument_for_proper_class", lambda *_: None)

    model_type, token, image_class, processor_class, merge, settings, options, place = CASES[name]
    image_processor = getattr(transformers, image_class)(**settings)
    if name == "paligemma":
        image_processor.image_seq_length = 16
    if name == "cohere2_vision":  # whose own needs torchvision
        image_processor.patch_size = 2
    image_processor.save_pretrained(tmp_path)
    theirs = their_processor(processor_class, image_processor, **dict(options))
    fields: dict[str, Any] = {}
    if name == "llava_next":
        points = PINPOINTS["image_grid_pinpoints"]
        fields = dict(has_newline=True, resolutions=tuple((height, width) for height, width in points))
    reader = make_reader(tmp_path, model_type, token, merge, **fields)
    pictures = [picture(1), picture(2, 60, 30)]
    text = f"{place}{place}What is here?" if name == "paligemma" else f"Look: {place} and {place}, the same?"
    given: Any = [pictures] if name in ("idefics3", "gemma3", "gemma3_crops", "paligemma") else pictures
    asked = CROPS if name == "gemma3_crops" else {}
    made = theirs(text=[text], images=given, return_tensors="np", **asked)
    token_ids, images = reader.prepare(text, pictures)
    assert token_ids == made["input_ids"][0].tolist()
    places = np.concatenate([image.places for image in images])
    assert places.tolist() == [i for i, t in enumerate(token_ids) if t == make_tokenizer().token_to_id(token)]
    assert reader.placeholder == place


@pytest.mark.parametrize(
    "prompt", ["<image>What?", "<image><image>What?", "Look: <image>what?", "<image><bos>What?", "<bos><image>What?"]
)
def test_the_begin_of_a_prompt_of_llama_3_2_stands_behind_its_images(prompt: str, tmp_path: Path) -> None:
    import transformers

    image_processor: Any = transformers.MllamaImageProcessorPil(**SQUARE)
    image_processor.save_pretrained(tmp_path)
    extra = {"extra_special_tokens": {"image_token": "<image>"}}
    theirs = their_processor("MllamaProcessor", image_processor, tokens=extra)
    pictures = [picture(1), picture(2, 60, 60)][: prompt.count("<image>")]
    wanted = theirs(images=[pictures], text=[prompt], return_tensors="np", add_special_tokens=False)
    reader = make_reader(tmp_path, "mllama", "<image>", 1, tile_shapes=((1, 1), (1, 2), (2, 1), (2, 2)), max_tiles=4)
    token_ids, images = reader.prepare(prompt, pictures)
    assert token_ids == np.asarray(wanted["input_ids"])[0].tolist()
    assert [image.shape for image in images] == wanted["aspect_ratio_ids"][0].tolist()
    assert [image.num_tiles for image in images] == wanted["cross_attention_mask"].any(1).sum(-1)[0].tolist()


def test_prompts_of_processors_that_need_torchvision(tmp_path: Path) -> None:
    """Written out after transformers' code."""
    import transformers

    settings: dict[str, Any] = {"size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}}
    transformers.PixtralImageProcessorPil(**settings).save_pretrained(tmp_path)
    reader = make_reader(tmp_path, "mistral3", "[IMG]", 2)
    token_ids, [image] = reader.prepare("a[IMG]b", [picture(1)])  # 42 x 42 pixels, squares of 14
    wanted = "a" + "[IMG][IMG][IMG][IMG_BREAK]" * 2 + "[IMG][IMG][IMG][IMG_END]b"
    assert image.grid == (6, 6) and token_ids == make_tokenizer().encode(wanted).ids
    write, rows = style_of("llama4", "").write, ["r1", "r2", "r3", "r4", "whole"]
    between, behind = "<|tile_x_separator|>", "<|tile_y_separator|>"
    tiles = f"r1{between}r2{behind}r3{between}r4{behind}"
    assert write(rows, (2, 2)) == f"<|image_start|>{tiles}<|image|>whole<|image_end|>"
    assert write(rows[-1:], (1, 1)) == "<|image_start|><|image|>whole<|image_end|>"


def test_sources_of_an_image_give_the_same_picture(tmp_path: Path) -> None:
    image, limits = picture(4), ImageLimits()
    file = tmp_path / "a.png"
    image.save(file)
    for source in (image, file, str(file), f"file://{file}", file.read_bytes(), data_url(image)):
        assert np.array_equal(np.asarray(read_image(source, limits)), np.asarray(image))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/etc/hostname", "must be a data: URL"),
        ("file:///etc/hostname", "must be a data: URL, got a file: URL"),
        ("http://127.0.0.1:9/a.png", "are not fetched by this server"),
        ("data:image/png;base64,!!", "a data: URL is damaged"),
        (f"data:image/png;base64,{base64.b64encode(b'no image').decode()}", "no image that Pillow can read"),
        (b"x" * 20_001, "are allowed"),
        (Image.new("RGB", (200, 100)), "200 x 100 pixels; 10000 are allowed"),
        (3, "got a int"),
    ],
)
def test_images_that_cannot_be_used(source: Any, message: str, tmp_path: Path) -> None:
    reader = make_reader(tmp_path, "llava", "<image>", 1)
    with pytest.raises(RequestError, match=message):
        reader.prepare("<image>", [source])


def test_too_many_images(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, "llava", "<image>", 1)
    with pytest.raises(RequestError, match="3 images in one request; 2 are allowed"):
        reader.prepare("<image>" * 3, [picture(1)] * 3)


def test_parts_of_messages_are_taken_out_in_order() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "u1"}},
        {"type": "input_image", "image_url": "u2"},
        {"type": "image", "base64": "AAAA"},
    ]
    plain, taken = take_images([{"role": "user", "content": "x"}, {"role": "user", "content": parts}])
    assert taken == ["u1", "u2", "data:;base64,AAAA"]
    assert plain[1]["content"] == [{"type": "text", "text": "a"}, *[{"type": "image"}] * 3]
    with pytest.raises(RequestError, match="holds no image"):
        take_images([{"role": "user", "content": [{"type": "image_url"}]}])
