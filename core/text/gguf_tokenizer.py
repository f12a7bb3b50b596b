"""A tokenizer out of the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..suggest import did_you_mean
from .decoding import CHAR_OF_BYTE, SPACE_MARK
from .gguf_pretokenizers import PRE_TOKENIZERS
from .tokenizer import Tokenizer, TokenizerInfo, set_added_ends

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_TURN_ENDS = frozenset(("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|return|>"))
"""Control tokens that end a turn, for files that do not name theirs."""
_BYTE_ALPHABET = frozenset(CHAR_OF_BYTE)
_REMEDIES = (
    "set tokenizer to a folder with the model's tokenizer.json",
    "set skip_tokenizer_init and pass token ids",
)


class TokenType(IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MARKED: dict[int, bool] = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
"""Types of tokens that are found whole in a text and spelled as they are, and whether they are special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The vocabulary as the file has it; lists by token id. `named`: "bos" and the like -> id."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]] | None
    named: Mapping[str, int]
    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def text_of(self, name: str) -> str | None:
        return self.tokens[self.named[name]] if name in self.named else None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata (key -> value; arrays are lists or numpy arrays).

    Serves tokenizer.ggml.model gpt2 (byte-level BPE), llama (SentencePiece BPE), bert (WordPiece) and t5
    (unigram). Raises ModelError if the file has no vocabulary, one of another kind, or a damaged one.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind is None:
        raise ModelError("the GGUF file has no tokenizer: tokenizer.ggml.model is missing", remedies=_REMEDIES)
    builder = _BUILDERS.get(str(kind))
    if builder is None:
        raise ModelError(
            f"the GGUF file's tokenizer is of kind {kind!r}; known kinds are {', '.join(_BUILDERS)}",
            remedies=_REMEDIES,
        )
    build, defaults = builder
    vocabulary = _read_vocabulary(metadata, defaults.ids)
    backend = build(vocabulary)
    _add_marked_tokens(backend, vocabulary)
    add_bos = bool(vocabulary.get("add_bos_token", defaults.add_bos or _pre_tokenizer_adds_bos(vocabulary, kind)))
    add_eos = bool(vocabulary.get("add_eos_token", defaults.add_eos))
    set_added_ends(
        backend,
        bos=vocabulary.text_of("bos") if add_bos else None,
        eos=vocabulary.text_of("eos") if add_eos else None,
    )
    return Tokenizer(backend, _read_info(vocabulary))


# ---- reading ----------------------------------------------------------------------------------------------
_NAMES = {
    "bos": ("bos_token_id", "cls_token_id"),
    "eos": ("eos_token_id", "seperator_token_id"),  # the file format spells it so
    "unk": ("unknown_token_id",),
    "pad": ("padding_token_id",),
    "sep": ("seperator_token_id",),
    "cls": ("cls_token_id",),
    "mask": ("mask_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
}


def _read_vocabulary(metadata: Mapping[str, Any], default_ids: Mapping[str, int]) -> _Vocabulary:
    tokens = _read_list(metadata, "tokens")
    if set(map(type, tokens)) != {str}:
        raise ModelError("the GGUF file's tokenizer.ggml.tokens is missing, empty or no list of texts")
    types = list(map(int, _read_list(metadata, "token_type"))) or [int(TokenType.NORMAL)] * len(tokens)
    scores = list(map(float, _read_list(metadata, "scores"))) or [0.0] * len(tokens)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            raise ModelError(
                f"the GGUF file's tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens"
            )
    merges = None
    if _PREFIX + "merges" in metadata:
        merges = _split_merges(_read_list(metadata, "merges"))
    named: dict[str, int] = {}
    for name, keys in _NAMES.items():
        stated = next((metadata[_PREFIX + key] for key in keys if metadata.get(_PREFIX + key) is not None), None)
        if stated is not None and not 0 <= int(stated) < len(tokens):
            # A vocabulary without such a token is written as -1 or the largest integer.
            if int(stated) not in (-1, 2**32 - 1):
                raise ModelError(f"the GGUF file's {name} token id {stated} is outside its {len(tokens)} tokens")
            continue
        if stated is None and default_ids.get(name, len(tokens)) < len(tokens):
            stated = default_ids[name]
        if stated is not None:
            named[name] = int(stated)
    return _Vocabulary(tokens=tokens, types=types, scores=scores, merges=merges, named=named, metadata=metadata)


def _read_list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(_PREFIX + key, ())
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise ModelError(f"the GGUF file's {_PREFIX + key} is no list")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _split_merges(merges: list[Any]) -> list[tuple[str, str]]:
    if set(map(type, merges)) == {str} and set(map(str.count, merges, repeat(" "))) == {1}:  # as a rule, and fast
        pieces = " ".join(merges).split(" ")
        if "" not in pieces:
            return list(zip(pieces[::2], pieces[1::2], strict=True))
    return [_split_merge(merge) for merge in merges]


def _split_merge(merge: Any) -> tuple[str, str]:
    # The first character may itself be a space.
    middle = merge.find(" ", 1) if isinstance(merge, str) else -1
    if middle < 1 or middle == len(merge) - 1:
        raise ModelError(f"the GGUF file has a damaged merge rule {merge!r}")
    return merge[:middle], merge[middle + 1 :]


def _read_info(vocabulary: _Vocabulary) -> TokenizerInfo:
    names = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
    special = {f"{name}_token": text for name in names if (text := vocabulary.text_of(name)) is not None}
    ends = [vocabulary.named[name] for name in ("eos", "eot", "eom") if name in vocabulary.named]
    if "eot" not in vocabulary.named:
        ends += [
            id
            for id, token in enumerate(vocabulary.tokens)
            if token in _TURN_ENDS and vocabulary.types[id] == TokenType.CONTROL
        ]
    base = "tokenizer.chat_template"
    templates = {
        key.removeprefix(base).removeprefix(".") or "default": str(text)
        for key, text in vocabulary.metadata.items()
        if key == base or key.startswith(base + ".")
    }
    return TokenizerInfo(
        special_tokens=special,
        end_token_ids=ends,
        chat_templates=templates,
        vocab_size=len(vocabulary.tokens),
    )


# ---- building ---------------------------------------------------------------------------------------------
def _build_byte_level(vocabulary: _Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.merges is None:
        raise ModelError("the GGUF file's tokenizer is of kind 'gpt2' but tokenizer.ggml.merges is missing")
    pre = PRE_TOKENIZERS[_pre_tokenizer_name(vocabulary)]
    spellings = vocabulary.tokens
    if not _BYTE_ALPHABET.issuperset("".join(spellings)):
        spellings = [
            token if kind in _MARKED else _byte_level_spelling(token)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        ]
    ids = _ids_by_token(spellings, vocabulary.tokens)
    backend = Tokenizer(_bpe(models.BPE, ids, vocabulary.merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(vocabulary.get("add_space_prefix", False)), use_regex=pre.gpt2_last
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(vocabulary: _Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = _ids_by_token(vocabulary.tokens, vocabulary.tokens)
    merges = _implied_merges(vocabulary) if vocabulary.merges is None else vocabulary.merges
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": vocabulary.text_of("unk")}
    backend = Tokenizer(_bpe(models.BPE, ids, merges, **options))
    prefix = bool(vocabulary.get("add_space_prefix", True))
    # Not a pre-tokenizer: pieces may span words, and the prefix also follows a special token.
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE_MARK)] if prefix else []), normalizers.Replace(" ", SPACE_MARK)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _build_wordpiece(vocabulary: _Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # The file marks starts of words with a space mark, the library marks the other pieces with ##.
    pieces = [
        token
        if kind != TokenType.NORMAL
        else token.removeprefix(SPACE_MARK)
        if token.startswith(SPACE_MARK)
        else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    unknown = vocabulary.text_of("unk") or "[UNK]"
    backend = Tokenizer(models.WordPiece(_ids_by_token(pieces, vocabulary.tokens), unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _build_unigram(vocabulary: _Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    backend = Tokenizer(models.Unigram(pieces, vocabulary.named.get("unk"), False))
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.get("precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if vocabulary.get("remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.get("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    return backend


def _bpe(make: Any, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return make(ids, merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}", remedies=_REMEDIES) from error


def _ids_by_token(spellings: Sequence[str], tokens: Sequence[str]) -> dict[str, int]:
    ids = dict(zip(reversed(spellings), reversed(range(len(spellings))), strict=True))
    if len(ids) != len(spellings):
        id = next(id for id, spelling in enumerate(spellings) if ids[spelling] != id)
        raise ModelError(
            f"the GGUF file has the token {tokens[id]!r} twice, as {ids[spellings[id]]} and {id}", remedies=_REMEDIES
        )
    return ids


def _byte_level_spelling(token: str) -> str:
    # Some files hold a plain word as text; merges know it by its bytes.
    if _BYTE_ALPHABET.issuperset(token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode())


def _implied_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece files hold scores, not merges: the pair whose whole has the best score merges first."""
    scores = {
        token: (-score, id)
        for id, (token, score, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        )
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[tuple[float, int], tuple[float, int], tuple[float, int], str, str]] = []
    for token, rank in scores.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in scores and right in scores:
                ranked.append((rank, scores[left], scores[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_marked_tokens(backend: "tokenizers.Tokenizer", vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    marked = [(vocabulary.tokens[id], kind) for id, kind in enumerate(vocabulary.types) if kind in _MARKED]
    special, plain = (
        [
            AddedToken(token, normalized=False, special=is_special)
            for token, kind in marked
            if _MARKED[kind] is is_special and token and backend.token_to_id(token) is not None
        ]
        for is_special in (True, False)
    )
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _pre_tokenizer_name(vocabulary: _Vocabulary) -> str:
    name = str(vocabulary.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {name!r} is unknown{did_you_mean(name, PRE_TOKENIZERS)}",
            remedies=_REMEDIES,
        )
    return name


def _pre_tokenizer_adds_bos(vocabulary: _Vocabulary, kind: str) -> bool:
    return kind == "gpt2" and PRE_TOKENIZERS[_pre_tokenizer_name(vocabulary)].add_bos


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What holds for files that do not say."""

    ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False


_BUILDERS = {
    "gpt2": (_build_byte_level, _Defaults(ids={})),
    "llama": (_build_sentencepiece, _Defaults(ids={"bos": 1, "eos": 2, "unk": 0}, add_bos=True)),
    "bert": (
        _build_wordpiece,
        _Defaults(
            ids={"bos": 101, "eos": 102, "unk": 100, "sep": 102, "pad": 0, "mask": 103, "cls": 101},
            add_bos=True,
            add_eos=True,
        ),
    ),
    "t5": (_build_unigram, _Defaults(ids={"eos": 1, "unk": 2, "pad": 0}, add_eos=True)),
}
