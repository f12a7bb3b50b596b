"""Incremental text against decoding everything at once, for every kind of vocabulary; stop strings against a
character-by-character search."""

from collections.abc import Callable, Sequence

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.sampling.params import SamplingParams
from headrace.core.text.detokenizer import Detokenizer
from headrace.core.text.gguf_tokenizer import tokenizer_from_gguf
from headrace.core.text.tokenizer import Tokenizer
from tiny_tokenizers import sentencepiece_fields, train_suffix_bpe

KINDS = ("byte level", "byte fallback", "wordpiece", "metaspace", "suffix", "no decoder")
property_test = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.lists(st.integers(0, 10**6), max_size=40)
cuts = st.lists(st.integers(1, 4), max_size=60)


@pytest.fixture(scope="module")
def make(
    byte_level: tokenizers.Tokenizer,
    spm_bpe: sentencepiece.SentencePieceProcessor,
    wordpiece: tokenizers.Tokenizer,
    spm_unigram: sentencepiece.SentencePieceProcessor,
) -> Callable[[str], Tokenizer]:
    """kind -> tokenizer"""

    def from_sentencepiece(trained: sentencepiece.SentencePieceProcessor, kind: str) -> Tokenizer:
        fields = sentencepiece_fields(trained, kind)
        return tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in fields.items() if v != -1})

    plain = tokenizers.Tokenizer.from_str(wordpiece.to_str())
    plain.decoder = None

    made = {
        "byte level": Tokenizer(byte_level),
        "byte fallback": from_sentencepiece(spm_bpe, "llama"),
        "wordpiece": Tokenizer(wordpiece),
        "metaspace": from_sentencepiece(spm_unigram, "t5"),
        "suffix": Tokenizer(train_suffix_bpe()),
        "no decoder": Tokenizer(plain),
    }
    return made.__getitem__


def run(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> tuple[list[str], str | None]:
    """Push in chunks of the given sizes, then one by one; the deltas and the stop reason."""
    deltas: list[str] = []
    rest, sizes = list(ids), list(cuts)
    while rest:
        size = sizes.pop() if sizes else 1
        delta = detokenizer.push(rest[:size])
        deltas.append(delta.text)
        if delta.stop_reason is not None:
            return deltas, delta.stop_reason
        rest = rest[size:]
    return [*deltas, detokenizer.finish()], None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_together_are_the_whole_text(kind: str, skip: bool, make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make(kind)

    @property_test
    @given(seeds, cuts)
    def check(numbers: list[int], sizes: list[int]) -> None:
        ids = [number % tokenizer.vocab_size for number in numbers]
        detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), [])
        deltas, _ = run(detokenizer, ids, sizes)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas) == whole
        assert tokenizer.decoding.byte_fallback or whole == tokenizer.backend.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "wordpiece", "metaspace"])
def test_output_continues_the_prompt(kind: str, make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make(kind)

    @property_test
    @given(st.text(max_size=30), seeds.filter(bool))
    def check(text: str, numbers: list[int]) -> None:
        ids = [number % tokenizer.vocab_size for number in numbers]
        prompt = tokenizer.encode(text)
        deltas, _ = run(Detokenizer(tokenizer, SamplingParams(), prompt), ids, [])
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
        assert whole == before + "".join(deltas)

    check()


def test_a_character_half_in_the_prompt_comes_whole(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("byte level")
    ids = tokenizer.encode("\U0001f99c")
    assert len(ids) == 3
    detokenizer = Detokenizer(tokenizer, SamplingParams(), ids[:1])
    assert [detokenizer.push([id]).text for id in ids[1:]] == ["", "\U0001f99c"]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_emoji_and_their_parts_come_whole(kind: str, make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make(kind)
    text = "ok \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d!"
    detokenizer = Detokenizer(tokenizer, SamplingParams(), tokenizer.encode("so"))
    deltas, _ = run(detokenizer, tokenizer.encode(text, add_special_tokens=False), [])
    assert "".join(deltas).lstrip(" ") == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_a_text_that_ends_in_half_a_character_says_so(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("byte level")
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [])
    assert detokenizer.push(tokenizer.encode("a\U0001f99c")[:-1]).text == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_ids_without_a_token_add_nothing(make: Callable[[str], Tokenizer]) -> None:
    for kind in KINDS:
        tokenizer = make(kind)
        detokenizer = Detokenizer(tokenizer, SamplingParams(), [])
        assert detokenizer.push([tokenizer.vocab_size, tokenizer.vocab_size + 7]).text == ""


# ---- stop strings -----------------------------------------------------------------------------------------
def expected_stop(pieces: Sequence[str], params: SamplingParams) -> tuple[str, str | None]:
    """The definition, character by character: text and stop string of a completion made of these tokens."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            matches = [stop for stop in params.stop if text.endswith(stop)]
            if matches and number > params.min_tokens:
                longest = max(matches, key=len)
                return (text if params.include_stop_str_in_output else text[: -len(longest)]), longest
    return text, None


@property_test
@given(
    st.lists(st.sampled_from([*"ab", "ab", "\u00e9"]), max_size=25).map("".join),
    st.lists(st.sampled_from(["a", "ab", "aab", "bab", "\u00e9a", "abab\u00e9", "bb"]), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 6),
    cuts,
)
def test_stop_strings(
    byte_level: tokenizers.Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int, sizes: list[int]
) -> None:
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode(text)
    pieces: list[str] = []
    for end in range(len(ids)):
        # A character belongs to the token that completes it.
        done = tokenizer.decode(ids[: end + 1]).rstrip("\ufffd")
        pieces.append(done[len("".join(pieces)) :])
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    deltas, reason = run(Detokenizer(tokenizer, params, []), ids, sizes)
    assert ("".join(deltas), reason) == expected_stop(pieces, params)


def test_only_what_could_begin_a_stop_string_is_withheld(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("byte level")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["</answer>", "<b"]), [])
    texts = [detokenizer.push(tokenizer.encode(text)).text for text in ("x</ans", "w", "er", ">?", "<", "c")]
    assert texts == ["x", "", "", "", "", ""] or texts[0] == "x"
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["</answer>"]), [])
    assert detokenizer.push(tokenizer.encode("x</ans")).text == "x"
    assert detokenizer.push(tokenizer.encode("v")).text == "</ansv"
    assert detokenizer.push(tokenizer.encode("<")).text == ""
    assert detokenizer.finish() == "<"


def test_nothing_comes_after_a_stop(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("byte level")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="END"), [])
    delta = detokenizer.push(tokenizer.encode("well ENDING"))
    assert (delta.text, delta.stop_reason) == ("well ", "END")
    assert detokenizer.push(tokenizer.encode("more")).text == "" and detokenizer.finish() == ""


def test_a_stop_string_may_cut_an_emoji_sequence(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("byte level")
    family = "\U0001f468\u200d\U0001f469"
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="\u200d"), [])
    deltas, reason = run(detokenizer, tokenizer.encode(f"a {family} b"), [])
    assert ("".join(deltas), reason) == ("a \U0001f468", "\u200d")
