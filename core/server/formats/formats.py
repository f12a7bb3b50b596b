"""Which format a model's answers have: the checkpoint's own, or the built-in one whose markers its template has."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...json_text import parse_json
from ...model_file import read_json
from .parser import AnswerParser
from .template import Anchor, ResponseTemplate, read_template
from .tools import Tool

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

FALLBACK = "hermes"
"""The format of calls for a model that was taught none: a grammar can make it write that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls are written, for the grammar that makes a model write them.

    call holds {name}, {arguments} and perhaps {index}. argument: how one argument is written, with {key} and
    {value}, if they are no JSON object; raw_strings: texts in them stand without quotes. Without `between` there
    is one call at most.
    """

    call: str
    before: str = ""
    between: str | None = None
    after: str = ""
    argument: str = ""
    between_arguments: str = ""
    raw_strings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSyntax:
    """How thinking is written: between open and close, and what comes before the answer."""

    open: str
    close: str
    then: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of answers. markers: texts that a chat template of such a model has, all of one list."""

    name: str
    template: ResponseTemplate
    markers: tuple[tuple[str, ...], ...] = ()
    calls: CallSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    id_text: str = ""
    id_length: int = 0

    @property
    def has_tools(self) -> bool:
        """True if calls can be read."""
        return self.template.tools is not None

    def new_id(self, name: str, index: int) -> str:
        """An id for a call; some models read it back and want it in a form of their own."""
        if self.id_text:
            return self.id_text.replace("{name}", name).replace("{index}", str(index))
        if self.id_length:
            return secrets.token_hex(self.id_length)[: self.id_length]
        return f"call_{secrets.token_hex(12)}"

    def new_parser(
        self,
        *,
        prompt: str,
        tools: Sequence[Tool] = (),
        parse_tools: bool | None = None,
        parallel: bool = True,
    ) -> AnswerParser:
        """A parser for one answer to `prompt` (its text). parse_tools: None reads calls if there are tools;
        tool_choice "none" wants False. parallel: False drops all calls but the first."""
        return AnswerParser(
            self.template,
            prompt=prompt,
            parameters={tool.name: tool.properties for tool in tools},
            parse_tools=bool(tools) if parse_tools is None else parse_tools,
            max_calls=None if parallel else 1,
            new_id=self.new_id,
        )

    def needs_special_tokens(self, tokenizer: "Tokenizer") -> bool:
        """True if the markers are special tokens: the text must be made with skip_special_tokens=False."""
        special = {token for id in tokenizer.special_ids if (token := tokenizer.backend.id_to_token(id))}
        text = "\n".join(_texts(anchor) for field in self.template.fields for anchor in (field.open, field.close))
        return any(token in text for token in special)


def find_format(chat_template: str | Mapping[str, str] | None, folder: Path | None = None) -> Format | None:
    """The format of a model's answers, or None if nothing is known: then all of an answer is content.

    chat_template: as Tokenizer.chat_template gives it. folder: the checkpoint's, whose tokenizer_config.json may
    hold a response_template, which wins. Raises ModelError if that is damaged.
    """
    text = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
    matches = [
        (max(lengths), format.name, format)
        for format in builtin_formats().values()
        if (lengths := [sum(map(len, marks)) for marks in format.markers if all(mark in text for mark in marks)])
    ]
    builtin = max(matches, key=lambda match: match[:2])[2] if matches else None
    own = _own_template(folder)
    if own is None:
        return builtin
    like = builtin if builtin is not None and (builtin.has_tools == (own.tools is not None)) else None
    return Format(
        name="checkpoint",
        template=own,
        calls=like.calls if like else None,
        reasoning=like.reasoning if like else None,
        id_text=like.id_text if like else "",
        id_length=like.id_length if like else 0,
    )


def tool_format(format: Format | None) -> Format:
    """The format for a request with tools: the model's own if it has calls, else one that a grammar can force."""
    return (
        format
        if format is not None and format.has_tools and format.calls is not None
        else builtin_formats()[FALLBACK]
    )


@cache
def builtin_formats() -> Mapping[str, Format]:
    """The formats that headrace knows, by name."""
    folder = resources.files(__name__.rpartition(".")[0]) / "builtin"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {
        file.name[:-5]: _read_format(file.name[:-5], parse_json(file.read_text(encoding="ascii"))) for file in files
    }


def _read_format(name: str, data: Mapping[str, Any]) -> Format:
    template = read_template(data["response_template"], name)
    reasoning = None
    if "reasoning" in data:
        reasoning = ReasoningSyntax(**data["reasoning"])
    elif (
        template.reasoning is not None
        and template.reasoning.open is not None
        and template.reasoning.close is not None
    ):
        reasoning = ReasoningSyntax(
            open=template.reasoning.open.literals[0], close=template.reasoning.close.literals[0], then=""
        )
    return Format(
        name=name,
        template=template,
        markers=tuple(map(tuple, data["markers"])),
        calls=CallSyntax(**data["calls"]) if "calls" in data else None,
        reasoning=reasoning,
        id_text=data.get("call_id", {}).get("text", ""),
        id_length=data.get("call_id", {}).get("random", 0),
    )


def _own_template(folder: Path | None) -> ResponseTemplate | None:
    if folder is None:
        return None
    file = folder / "tokenizer_config.json"
    data = read_json(file).get("response_template")
    return None if data is None else read_template(data, str(file))


def _texts(anchor: Anchor | None) -> str:
    return "" if anchor is None else "\n".join((*anchor.literals, anchor.pattern.replace("\\", "")))
