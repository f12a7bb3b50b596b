"""How byte-level vocabularies cut text into words before merging, by the name that a GGUF file gives (one table)."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Regular expressions applied one after the other, each isolating what it matches.

    gpt2_last: GPT-2's own expression follows. ignore_merges: a word that is a token is not built by merges.
    add_bos: what holds for files that do not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2_last: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str = r"\p{L}", digits: str = r"\p{N}", others: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The expression that Llama 3, Qwen and others share but for these parts."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{others}|{_SPACES}"


def _cased_words(digits: str, contractions: str = "") -> str:
    """The expression of GPT-4o's kind, which cuts before a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = PreTokenizer(gpt2_last=True)
_DIGITS_GPT2 = PreTokenizer(patterns=(r"\p{N}",), gpt2_last=True)
_LLAMA3 = PreTokenizer(patterns=(_words(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_THREE_DIGITS = PreTokenizer(patterns=(_words(digits=r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer(patterns=(_words(),))
_GPT4O = PreTokenizer(patterns=(_cased_words(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?"),))
_BLOOM = PreTokenizer(patterns=(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7a3]+"
_SYMBOL_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat", "mellum", "a.x-4.0"), _GPT2
    ),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "trillion"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    "lfm2": replace(_LLAMA3, add_bos=False),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo"), _QWEN2),
    "qwen35": PreTokenizer(patterns=(_words(r"[\p{L}\p{M}]", others=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "tekken": PreTokenizer(patterns=(_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "seed-coder": PreTokenizer(patterns=(_words(others=r"[^\s\p{L}\p{N}\r\n]+"),)),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+",), gpt2_last=True),
    "deepseek-coder": PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _SYMBOL_WORDS)
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": replace(_BLOOM, patterns=(*_BLOOM.patterns, r"\p{N}")),
}
"""tokenizer.ggml.pre -> how to cut. A file without the key is taken as "default"."""
