"""Text to token ids and back: a thin layer over the tokenizers library, and the reading of a tokenizer's folder."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, RequestError
from ..model_file import has_file, read_json
from .decoding import Decoding, piece_bytes, read_decoding

if TYPE_CHECKING:
    import tokenizers

_logger = logging.getLogger(__name__)

SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files of tokenizers that exist only in their original form and must be converted."""
_CHARS_OF_A_BEGINNING = 4096
_CHARS_OF_A_TOKEN = 16
"""A generous guess; a text with longer tokens is read again, further."""
_TOKENS_AT_A_CUT = 64
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """What is known of a tokenizer beside its rules.

    special_tokens: "bos_token" and the like -> the token's text, as chat templates see them.
    end_token_ids: tokens that end a generation; the first is the end of sequence.
    chat_templates: name -> template; "default" is the usual one. vocab_size: ids below this are in the
    vocabulary even if no token has them.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_token_ids: Sequence[int] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int = 0


class Tokenizer:
    """A vocabulary with its rules. Immutable once made; may be used by several threads."""

    def __init__(self, backend: "tokenizers.Tokenizer", info: TokenizerInfo | None = None) -> None:
        info = info or TokenizerInfo()
        added = backend.get_added_tokens_decoder()
        backend.no_truncation()  # files of sentence-transformers switch both on
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(info.special_tokens)
        self.chat_templates = dict(info.chat_templates)
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        in_use = (backend.get_vocab_size(with_added_tokens=True), *(id + 1 for id in added))
        self.vocab_size = max(info.vocab_size, *in_use)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.unk_token_id = self._named_id("unk_token")
        ends = () if self.eos_token_id is None else (self.eos_token_id,)
        self.end_token_ids = tuple(dict.fromkeys((*ends, *info.end_token_ids)))
        state = None if backend.decoder is None else backend.decoder.__getstate__()
        self.decoding: Decoding = read_decoding(state)
        self._bytes: dict[int, bytes] = {}

    @property
    def base_vocab_size(self) -> int:
        """Tokens of the vocabulary itself, without those that were added to it later."""
        return int(self.backend.get_vocab_size(with_added_tokens=False))

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token may stand for; a text has at least its length divided by this of tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def chat_template(self) -> Mapping[str, str] | None:
        """The chat templates by name ("default" is the usual one), or None if there is none."""
        return self.chat_templates or None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text become their ids; lone surrogates, which
        are no text, become U+FFFD."""
        return list(self.backend.encode(_clean(text), add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in parallel."""
        encodings = self.backend.encode_batch([_clean(text) for text in texts], add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def encode_pair(
        self, text: str, pair: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text, or of two that are read together, with special tokens; and which text each is of.

        max_tokens: if there are more, tokens are cut off the end of the longer text, special ones stay.
        """
        first = self._encode_beginning(text, max_tokens)
        second = None if pair is None else self._encode_beginning(pair, max_tokens)
        if max_tokens is not None:
            room = max(0, max_tokens - self.backend.num_special_tokens_to_add(pair is not None))
            lengths = _shorten(len(first.ids), 0 if second is None else len(second.ids), room)
            first.truncate(lengths[0])
            if second is not None:
                second.truncate(lengths[1])
        encoding = self.backend.post_process(first, second, True)
        return list(encoding.ids)[:max_tokens], list(encoding.type_ids)[:max_tokens]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD. Raises RequestError for an id that
        the vocabulary lacks."""
        ids = list(token_ids)
        for id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= id < self.vocab_size:
                raise RequestError(f"token id {id} is not in the vocabulary of {self.vocab_size} tokens")
        if not self.decoding.byte_fallback:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        # The library gives up a whole run of byte tokens if a part of it is no UTF-8; we lose only that part.
        kept = [id for id in ids if not (skip_special_tokens and id in self.special_ids)]
        text = b"".join(map(self.token_bytes, kept)).decode(errors="replace")
        strip = self.decoding.strip
        return text[:strip].lstrip(" ") + text[strip:]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> str | list[int]:
        """The prompt that the model's chat template makes of messages (`ChatTemplate.render`), as token ids or text.
        Unlike the template, which begins an answer, transformers' method does so with add_generation_prompt alone.
        Raises RequestError, or ModelError without a template."""
        from .chat import ChatTemplate

        options.setdefault("add_generation_prompt", False)
        text = ChatTemplate(self.chat_template or {}, self.special_tokens).render(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def token_text(self, token_id: int) -> str:
        """One token's own text: with its leading space, U+FFFD where it holds a part of a character; "" for an
        id without a token."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, which may be a part of a character; b"" for an id without a token (models pad
        their vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def _encode_beginning(self, text: str, num_tokens: int | None) -> Any:
        """The encoding of a text; of one that is far longer, of a beginning that has many more tokens than these.

        Where a text is cut changes its last tokens, not those before.
        """
        text = _clean(text)
        length = len(text) if num_tokens is None else _CHARS_OF_A_BEGINNING + _CHARS_OF_A_TOKEN * num_tokens
        while length < len(text):
            found = self.backend.encode(text[:length], add_special_tokens=False)
            if num_tokens is not None and len(found.ids) >= 2 * num_tokens + _TOKENS_AT_A_CUT:
                return found
            length *= 4  # of blanks, or of words that are one unknown token each
        return self.backend.encode(text, add_special_tokens=False)

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return b""
        if self.decoding.kind == "other":
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return piece_bytes(piece, self.decoding)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's folder, as Hugging Face lays it out.

    Reads tokenizer.json, else Llama's kind of tokenizer.model, else what transformers makes of the original files;
    and tokenizer_config.json, special_tokens_map.json, chat_template.jinja and chat_templates/*.jinja. As in
    transformers, what is put around a text is tokenizer.json's matter, and the config's add_bos_token is heard only
    where there is none.
    A special token that the vocabulary lacks counts for nothing, and the log says so.
    Raises ModelError if there is no tokenizer or a file is damaged.
    """
    config = read_json(path / "tokenizer_config.json")
    file = path / "tokenizer.json"
    known: Mapping[str, str] = {}
    if has_file(file):
        backend = _read_backend(file)
    elif (found := _read_original(path, config)) is not None:
        backend, known = found.backend, found.special_tokens
    else:
        backend = _convert_slow(path)
    special = {**known, **_special_tokens({**read_json(path / "special_tokens_map.json"), **config})}
    _add_config_tokens(backend, config, special)
    lacking = {name: token for name, token in special.items() if token and backend.token_to_id(token) is None}
    if lacking:
        names = ", ".join(f"{name} {token!r:.60}" for name, token in lacking.items())
        effect = "; texts do not end at it" if "eos_token" in lacking else ""
        _logger.warning("the vocabulary in %s has no such token: %s%s", path, names, effect)
    templates = _read_templates(path, config)
    return Tokenizer(backend, TokenizerInfo(special_tokens=special, chat_templates=templates))


def set_added_ends(backend: "tokenizers.Tokenizer", *, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens around a text (None: nothing there), in place of what it did."""
    from tokenizers.processors import TemplateProcessing

    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    before, after = ([token] if token in ids and ids[token] is not None else [] for token in (bos, eos))
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, id) for token, id in ids.items() if id is not None],
    )


def _shorten(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that fit: tokens go from the longer one until they do."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def _clean(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_backend(file: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise ModelError(
            f"{file} is damaged or newer than the installed tokenizers {tokenizers.__version__}: {error}",
            remedies=("download the file again", "pip install -U tokenizers"),
        ) from error


def _read_original(path: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """SentencePiece's own file, if it is of the kind that is read here."""
    file = path / SLOW_FILES[0]
    if not has_file(file):
        return None
    from .sentencepiece_model import read_sentencepiece

    return read_sentencepiece(file, config)


def _convert_slow(path: Path) -> "tokenizers.Tokenizer":
    if not path.is_dir():
        raise ModelError(f"no folder {path} to read a tokenizer from")
    present = [name for name in SLOW_FILES if has_file(path / name)]
    if not present:
        raise ModelError(
            f"no tokenizer in {path}: neither tokenizer.json nor any of {', '.join(SLOW_FILES)}",
            remedies=(
                "copy the tokenizer's files into the folder",
                "set tokenizer to a folder that has them",
                "set skip_tokenizer_init and pass token ids",
            ),
        )
    remedy = "pip install transformers sentencepiece"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{path} has {present[0]} but no tokenizer.json; converting it needs transformers", remedies=(remedy,)
        ) from error
    try:
        converted: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # whatever the conversion raises, the tokenizer is not usable
        raise ModelError(
            f"transformers cannot convert {path / present[0]}: {error}",
            remedies=(remedy, "copy a tokenizer.json into the folder"),
        ) from error
    _check_conversion(path / present[0], backend)
    return backend


def _check_conversion(file: Path, backend: "tokenizers.Tokenizer") -> None:
    """Raises ModelError if pieces of one kind of model were taken for another's, which gives other token ids."""
    from .sentencepiece_model import sentencepiece_kind

    found = type(backend.model).__name__
    if file.suffix == ".model" and sentencepiece_kind(file) not in (None, found):
        raise ModelError(
            f"{file} is a {sentencepiece_kind(file)} model, but the class that tokenizer_config.json names reads it "
            f"as {found}: token ids would be wrong",
            remedies=("copy a tokenizer.json into the folder", "set tokenizer_class to the class of the tokenizer"),
        )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            special[name] = text
        elif value is not None:
            raise ModelError(
                f"{name} in tokenizer_config.json or special_tokens_map.json must be text, or an object whose "
                f"content is text, got {value!r:.100}",
                remedies=("correct the file", "download it again"),
            )
    return special


def _add_config_tokens(
    backend: "tokenizers.Tokenizer", config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    # tokenizer_config.json may know tokens, or that tokens are special, which tokenizer.json does not.
    from tokenizers import AddedToken

    entries = config.get("added_tokens_decoder")
    try:
        for _, entry in (
            sorted(entries.items(), key=lambda item: int(item[0])) if isinstance(entries, Mapping) else ()
        ):
            if backend.token_to_id(entry["content"]) is None:
                backend.add_tokens([AddedToken(**{k: v for k, v in entry.items() if k != "id"})])
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(
            f"added_tokens_decoder in tokenizer_config.json is damaged: {type(error).__name__}: {error}",
            remedies=("download the file again",),
        ) from error
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in special.values() if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        try:
            templates.update({str(entry["name"]): str(entry["template"]) for entry in stated})
        except (TypeError, KeyError) as error:
            raise ModelError(
                "chat_template in tokenizer_config.json is neither text nor a list of objects with name and template",
                remedies=("download the file again", "--chat-template FILE"),
            ) from error
    files = {"default": path / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((path / "chat_templates").glob("*.jinja"))})
    for name, file in files.items():
        if has_file(file):
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read {file}: {error}") from error
    return templates
