"""The token sequences that spell a bad word."""

from collections.abc import Sequence

from .tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it is spelled at the start of a text and after a space, without duplicates.

    As in vLLM a space before a word does not matter: both spellings are banned. Other spellings, such as one
    with the word cut into smaller tokens, stay possible.
    """
    spellings = [prefix + word.lstrip(" ") for word in words for prefix in ("", " ")]
    sequences = tokenizer.encode_batch(spellings, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(sequence) for sequence in sequences if sequence))
