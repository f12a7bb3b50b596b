"""What stands in a part of an answer, read into values: text, JSON and its dialects, tags, lines, Python calls."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...json_text import parse_json
from .python_calls import read_python_calls

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def parse_value(text: str, parser: str, args: Mapping[str, Any]) -> Any:
    """Read `text` as `parser` says. Raises ValueError if it is something else."""
    return VALUE_PARSERS[parser](text, args)


def apply_transform(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Put values in the place of "{name}" and "{name.key}" in a structure. Raises ValueError if one is missing."""
    if isinstance(transform, Mapping):
        return {key: apply_transform(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [apply_transform(value, scope) for value in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{transform} is missing")
        value = value[key]
    return value


def placeholder(transform: Any) -> str:
    """The path in a text that is one placeholder, "" for anything else."""
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    return match[1] if match else ""


def cast_argument(value: Any, schema: object) -> Any:
    """A text that came without a type, as the type that a parameter's JSON schema says; the text if none fits."""
    if not isinstance(value, str):
        return value
    for kind in _types(schema):
        try:
            cast = _cast(value.strip(), kind)
        except ValueError:
            continue
        if cast is not _NO_VALUE:
            return cast
    return value


_NO_VALUE: Any = object()


def _cast(text: str, kind: str) -> Any:
    if kind == "integer":
        number = float(text)
        return (
            int(text)
            if "." not in text and "e" not in text.lower()
            else int(number)
            if number % 1 == 0
            else _NO_VALUE
        )
    if kind == "number":
        return _no_special_number(parse_json(text))
    if kind == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), _NO_VALUE)
    if kind == "null":
        return None if text in ("null", "None") else _NO_VALUE
    if kind in ("object", "array"):
        value = parse_json(text)
        return value if isinstance(value, dict if kind == "object" else list) else _NO_VALUE
    return _NO_VALUE


def _no_special_number(value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) != float("inf")
    return value if is_number and value == value else _NO_VALUE


def _types(schema: object) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else [kind for kind in declared if isinstance(kind, str)]
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += _types(choice)
    return [*types, "null"] if schema.get("nullable") else types


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _bool(text: str, args: Mapping[str, Any]) -> bool:
    return _text(text, args).lower() in ("true", "1")


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON. unquoted_keys: keys may be bare words. string_delims: pairs that stand for quotes. allow_non_json."""
    delims = args.get("string_delims", ())
    source = (
        _standard_json(text, delims, bool(args.get("unquoted_keys"))) if delims or args.get("unquoted_keys") else text
    )
    try:
        return parse_json(source)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _standard_json(text: str, delims: Any, unquoted_keys: bool) -> str:
    kinds = [r'(?P<quoted>"(?:\\.|[^"\\])*")']
    kinds += [f"{re.escape(begin)}(?P<string{n}>.*?){re.escape(end)}" for n, (begin, end) in enumerate(delims)]
    if unquoted_keys:
        kinds.append(r"(?<=[{,])(?P<before>\s*)(?P<key>\w+)(?P<after>\s*):")

    def standard(match: "re.Match[str]") -> str:
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        if "quoted" in groups:
            return match[0]
        if "key" in groups:
            return f'{groups["before"]}"{groups["key"]}"{groups["after"]}:'
        return json.dumps(next(iter(groups.values())), ensure_ascii=False)

    return re.sub("|".join(kinds), standard, text, flags=re.DOTALL)


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Tags of a key and a value, as tag_pattern finds them. merge_duplicates: a key that comes again has a list."""
    import regex

    found: dict[str, Any] = {}
    merged: set[str] = set()
    for match in regex.finditer(args["tag_pattern"], text, flags=regex.DOTALL):
        key, value = match["key"], _parse_inner(match["value"], args)
        if key in found and args.get("merge_duplicates"):
            found[key] = [*found[key], value] if key in merged else [found[key], value]
            merged.add(key)
        else:
            found[key] = value
    if not found and text.strip():
        raise ValueError("no tags in it")
    return found


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    separator = args.get("kv_sep", ":")
    for line in text.split(args.get("line_sep", "\n")):
        key, is_pair, value = line.partition(separator)
        if is_pair:
            found[_text(key, args)] = _parse_inner(_text(value, args), args)
    return found


def _parse_inner(text: str, args: Mapping[str, Any]) -> Any:
    inner = args.get("value_parser")
    return text if inner is None else parse_value(text, inner.get("name", "text"), inner.get("args", {}))


VALUE_PARSERS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": _bool,
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "python-call-list": lambda text, args: read_python_calls(text),
}
