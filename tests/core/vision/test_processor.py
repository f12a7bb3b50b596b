"""Prompts with images, against the checkpoints' own processors, and images that cannot be used."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

from headrace.core.errors import RequestError
from headrace.core.models.spec import ModelSpec, NormSpec, ProjectorSpec, VisionSpec
from headrace.core.text.tokenizer import Tokenizer, TokenizerInfo
from headrace.core.vision.images import ImageLimits, read_image, take_images
from headrace.core.vision.processor import ImageReader
from tiny_tokenizers import train_byte_level
from vision_cases import LLAVA, QWEN_SETTINGS, SQUARE, data_url, picture

TOKENS = [
    "<image>", "<bos>", "<image_soft_token>", "<start_of_image>", "<end_of_image>", "<|image_pad|>", "<|video_pad|>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
]  # fmt: skip


def make_tokenizer() -> tokenizers.Tokenizer:
    backend = train_byte_level()
    backend.add_special_tokens(TOKENS)
    return backend


def make_reader(folder: Path, model_type: str, token: str, merge: int, patch_size: int = 7) -> ImageReader:
    backend = make_tokenizer()
    encoder = ModelSpec(
        model_type="vit", vocab_size=0, hidden_size=8, max_position_embeddings=0, layers=(), norm=NormSpec()
    )
    vision = VisionSpec(
        encoder=encoder,
        projector=ProjectorSpec(dense=()),
        image_token_id=int(backend.token_to_id(token) or 0),
        patch_size=patch_size,
        merge=merge,
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
    tokenizer = fast(tokenizer_object=make_tokenizer(), bos_token="<bos>", **options.pop("tokens", {}))
    return getattr(transformers, name)(image_processor, tokenizer, **options)


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
    "idefics3": (
        "idefics3", "<image>", "Idefics3ImageProcessorPil", "Idefics3Processor", 2,
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, {"image_seq_len": 4}, "<image>",
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
    image_processor.save_pretrained(tmp_path)
    theirs = their_processor(processor_class, image_processor, **dict(options))
    reader = make_reader(tmp_path, model_type, token, merge)
    pictures = [picture(1), picture(2, 60, 30)]
    text = f"{place}{place}What is here?" if name == "paligemma" else f"Look: {place} and {place}, the same?"
    given: Any = [pictures] if name in ("idefics3", "gemma3", "paligemma") else pictures
    made = theirs(text=[text], images=given, return_tensors="np")
    token_ids, images = reader.prepare(text, pictures)
    assert token_ids == made["input_ids"][0].tolist()
    places = np.concatenate([image.places for image in images])
    assert places.tolist() == [i for i, t in enumerate(token_ids) if t == make_tokenizer().token_to_id(token)]
    assert reader.placeholder == place


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
