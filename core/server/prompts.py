"""Texts and conversations to token ids, in the front; long ones in threads, so that streams go on meanwhile."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..config import ServerConfig
from ..errors import HeadraceError, RequestError
from ..extras import images_remedies
from ..stages import ImageInput
from ..text.chat import ChatTemplate, read_template
from ..text.tokenizer import Tokenizer
from ..vision.images import ImageLimits
from ..vision.processor import ImageReader

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INLINE_CHARS = 4000
"""Texts up to this length (about 1 ms) are tokenized at once: a thread's round trip costs more."""
_LONG_CHARS = 2**20
"""Texts up to this length are tokenized in any case; unknown words may make tokens longer than the vocabulary's."""
_MANY_MESSAGES = 1000
"""So many messages are rendered in any case: a template may leave some out."""
_CHARS_OF_A_CALL = 40
"""What it costs to tokenize an empty text, in characters."""
_CHARS_OF_A_TOOL = 400
"""What it costs to write a tool into a prompt, in characters of a text."""
_NUM_THREADS = 2
_NUM_IMAGE_THREADS = 4


class Prompts:
    """Owns tokenizer and chat template of the model that is served."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str,
        model_name: str,
        images: ImageReader | None = None,
        max_model_len: int = 0,
    ) -> None:
        """chat_template: path of a file, "" for the model's own. images: of a model that reads them. Raises
        ModelError."""
        self._images = images
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")
        # Others' servers are slow at times: no text waits behind an image that is being fetched.
        self._image_threads = ThreadPoolExecutor(_NUM_IMAGE_THREADS, thread_name_prefix="images")
        self._template: ChatTemplate | None = None
        source: Any = tokenizer.chat_template if tokenizer is not None else None
        if chat_template:
            source = read_template(chat_template)
        if source is not None and tokenizer is not None:
            self._template = ChatTemplate(source, tokenizer.special_tokens)
            try:
                self._template.render([{"role": "user", "content": "Hello"}])  # so that the first request need not
            except HeadraceError as error:
                logger.debug("the chat template refuses a greeting: %s", error)

    @property
    def has_tokenizer(self) -> bool:
        """False with skip_tokenizer_init."""
        return self._tokenizer is not None

    @property
    def has_template(self) -> bool:
        """True if the model can chat."""
        return self._template is not None

    def is_read(self, name: str) -> bool:
        """Whether the model's chat template may look at something of this name."""
        return self._template is not None and self._template.mentions(name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if there is none."""
        if self._tokenizer is None:
            raise RequestError(
                "this server has no tokenizer (skip_tokenizer_init); send token ids", code="no_tokenizer"
            )
        return self._tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        (token_ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return token_ids

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        if not texts:
            return []
        tokenizer = self.tokenizer
        for text in texts:
            self.check_length(text)
        return await self.run(
            lambda: [tokenizer.encode(text, add_special_tokens) for text in texts],
            is_short=sum(len(text) + _CHARS_OF_A_CALL for text in texts) <= _INLINE_CHARS,
        )

    def check_length(self, text: str) -> None:
        """Raise RequestError for a text that is too long whatever its tokens are: to count those would take the
        hundredfold of its memory."""
        if len(text) > _LONG_CHARS and len(text) > self._max_model_len * self.tokenizer.longest_token:
            raise RequestError(
                f"the text has {len(text)} characters, which cannot be {self._max_model_len} tokens (max_model_len) "
                "or fewer",
                code="context_length_exceeded",
            )

    @property
    def max_messages(self) -> int:
        """More cannot fit: each has a token at least."""
        return max(self._max_model_len, _MANY_MESSAGES)

    def check_count(self, num_messages: int) -> None:
        """Raise RequestError for a conversation of more messages than tokens may be: reading them takes long."""
        if num_messages > self.max_messages:
            raise RequestError(
                f"the conversation has {num_messages} messages, which cannot be {self._max_model_len} tokens "
                "(max_model_len) or fewer",
                code="context_length_exceeded",
            )

    async def render(self, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        """The prompt that the template makes of a conversation. Raises RequestError."""
        template = self._template
        if template is None:
            raise RequestError(
                f"{self._model_name} has no chat template, so it cannot chat",
                code="no_chat_template",
                remedies=["--chat-template FILE", "/v1/completions with a plain prompt"],
            )
        self.check_count(len(messages))
        if self._images is not None:
            options["image_placeholder"] = self._images.placeholder
        size = sum(len(str(message.get("content") or "")) + _CHARS_OF_A_CALL for message in messages)
        size += sum(_CHARS_OF_A_TOOL for _ in options.get("tools") or ())
        return await self.run(lambda: template.render(messages, **options), is_short=size <= _INLINE_CHARS)

    def image_reader(self) -> ImageReader:
        """Raises RequestError where the model's encoder of images is not loaded."""
        if self._images is None:
            raise RequestError(
                f"{self._model_name} reads no images here", code="not_supported", remedies=images_remedies()
            )
        return self._images

    async def with_images(
        self, text: str, sources: Sequence[Any], *, add_special_tokens: bool
    ) -> tuple[list[int], list[ImageInput]]:
        """Token ids of a prompt with room for its images, and these. Raises RequestError."""
        self.check_length(text)
        images = self.image_reader()
        return await asyncio.get_running_loop().run_in_executor(
            self._image_threads, lambda: images.prepare(text, sources, add_special_tokens=add_special_tokens)
        )

    async def run(self, work: Callable[[], T], *, is_short: bool = False) -> T:
        """Do something that takes long in a thread, and something short at once."""
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._image_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def last_tokens(token_ids: list[int], limit: int | None, max_model_len: int, max_tokens: int | None) -> list[int]:
    """The end of a prompt that is to be cut to `limit` tokens (truncate_prompt_tokens; None: it is not), or by -1 to
    what leaves room for max_tokens. Raises RequestError."""
    if limit is None:
        return token_ids
    if limit < -1 or limit == 0:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or at least 1, got {limit}", code="invalid_sampling_params"
        )
    room = max(1, max_model_len - (1 if max_tokens is None else max_tokens))
    return token_ids[-(room if limit == -1 else limit) :]


def image_limits(config: ServerConfig) -> ImageLimits:
    """What images of requests may be: no files of this machine, and no other one's unless that is allowed."""
    return ImageLimits(
        max_images=config.max_images,
        max_bytes=config.max_image_bytes,
        max_pixels=config.max_image_pixels,
        allow_files=False,
        allow_remote=config.allow_remote_media,
        allow_private=config.allow_private_media,
    )
