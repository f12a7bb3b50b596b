"""Op implementations that are older than their declaration: one that lacks an optional argument still serves."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import Unsupported


def adapt(
    op: str, provider: str, implementation: Callable[..., Any], declared: Callable[..., Any]
) -> Callable[..., Any]:
    """The implementation, or, where it takes fewer optional arguments than are declared, a function that leaves them
    out as long as they have their defaults.

    What it returns raises Unsupported if a model gives such an argument a value: the old kernel would ignore it.
    """
    missing = _missing(implementation, declared)
    if not missing:
        return implementation
    count = len(_positional(inspect.signature(implementation)))
    behind = [parameter for parameter in missing if parameter.kind is not parameter.KEYWORD_ONLY]

    @functools.wraps(implementation)
    def older(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((parameter.name for parameter in behind), args[count:], strict=False))
        for parameter in missing:
            value = kwargs.pop(parameter.name, given.get(parameter.name, parameter.default))
            if value is not parameter.default and not _is_plain_equal(value, parameter.default):
                raise Unsupported(
                    f"op {op} of {provider} is older than its argument {parameter.name}, which this model needs",
                    remedies=["a newer version of that plugin", "HEADRACE_NO_PLUGINS=1"],
                )
        return implementation(*args[:count], **kwargs)

    return older


def _missing(implementation: Callable[..., Any], declared: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Optional arguments of the declaration that the implementation does not take."""
    try:
        own = inspect.signature(implementation)
    except (TypeError, ValueError):  # a builtin tells nothing of itself
        return ()
    kinds = {parameter.kind for parameter in own.parameters.values()}
    wanted = inspect.signature(declared)
    optional = [p for p in wanted.parameters.values() if p.default is not p.empty]
    by_name = [p for p in optional if p.kind is p.KEYWORD_ONLY and p.name not in own.parameters]
    behind = _positional(wanted)[len(_positional(own)) :]
    return [
        *([] if inspect.Parameter.VAR_POSITIONAL in kinds else [p for p in behind if p in optional]),
        *([] if inspect.Parameter.VAR_KEYWORD in kinds else by_name),
    ]


def _positional(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Arguments that may be given by place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]


def _is_plain_equal(value: Any, default: Any) -> bool:
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and bool(value == default)
