"""How a vocabulary's pieces become text: what each token's bytes are, and what happens to leading space.

Almost every decoder is one of two kinds, for which text is the concatenation of the tokens' own bytes: byte-level
(each character of a token stands for one byte) and pieces (a space mark, bytes as <0xNN>). All others are "other".
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A decoder, understood. `strip` is what the start of a whole text loses: a number of spaces, or all the
    space marks of its first token (-1)."""

    kind: Literal["bytes", "pieces", "other"]
    space_mark: str = ""
    byte_fallback: bool = False
    strip: int = 0


OTHER = Decoding(kind="other")


def read_decoding(state: bytes | None) -> Decoding:
    """Understand a decoder of the tokenizers library from its JSON state (None: there is no decoder)."""
    if state is None:
        return OTHER
    decoder = json.loads(state)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return Decoding(kind="bytes")
    if names == ["Metaspace"]:
        strip = 0 if steps[0].get("prepend_scheme", "always") == "never" else -1
        return Decoding(kind="pieces", space_mark=steps[0]["replacement"], strip=strip)
    return _read_steps(steps)


def piece_bytes(piece: str, decoding: Decoding) -> bytes:
    """The bytes that a token adds to a text, before anything is stripped from the text's start."""
    if decoding.kind == "bytes":
        try:
            return bytes(map(BYTE_OF_CHAR.__getitem__, piece))
        except KeyError:  # an added token, which is spelled as it is
            return piece.encode()
    if decoding.byte_fallback and (byte := fallback_byte(piece)) is not None:
        return bytes((byte,))
    return piece.replace(decoding.space_mark, " ").encode() if decoding.space_mark else piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte of a piece like <0x0A>, or None."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _read_steps(steps: list[dict[str, Any]]) -> Decoding:
    # The one order that SentencePiece conversions use: Replace, ByteFallback, Fuse, Strip; any may be missing.
    rest = list(steps)

    def take(name: str) -> dict[str, Any] | None:
        return rest.pop(0) if rest and rest[0]["type"] == name else None

    replace, fallback, fuse, strip = (take(name) for name in ("Replace", "ByteFallback", "Fuse", "Strip"))
    spells_space = replace is None or (replace["content"] == " " and len(replace["pattern"].get("String", "")) == 1)
    strips_start = strip is None or (strip["content"] == " " and strip["stop"] == 0)
    if rest or fuse is None or not spells_space or not strips_start:
        return OTHER
    return Decoding(
        kind="pieces",
        space_mark=replace["pattern"]["String"] if replace else "",
        byte_fallback=fallback is not None,
        strip=strip["start"] if strip else 0,
    )


def _byte_alphabet() -> str:
    # GPT-2's: printable Latin-1 stands for itself, the other bytes for characters from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


CHAR_OF_BYTE = _byte_alphabet()
"""The character that a byte-level vocabulary writes for each byte."""
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
