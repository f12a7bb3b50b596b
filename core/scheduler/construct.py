"""A cheaper way to make the records that every step makes once per request."""

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def fast_init(record: Callable[P, T]) -> Callable[P, T]:
    """The constructor of a frozen slots dataclass, about 2.5 times as fast, with the same keywords and defaults.

    A frozen dataclass sets each field through object.__setattr__, which looks the field's slot up by name; this
    one calls the slots' own setters. __post_init__ and default_factory are not supported.
    """
    record_type = cast(Any, record)
    fields = dataclasses.fields(record_type)
    assert not hasattr(record_type, "__post_init__"), record_type
    assert all(field.default_factory is dataclasses.MISSING for field in fields), record_type
    names: dict[str, Any] = {"new": object.__new__, "record": record_type}
    parameters = []
    for field in fields:
        names[f"set_{field.name}"] = record_type.__dict__[field.name].__set__
        names[f"default_{field.name}"] = field.default
        default = "" if field.default is dataclasses.MISSING else f"=default_{field.name}"
        parameters.append(field.name + default)
    lines = [
        f"def make(*, {', '.join(parameters)}):",
        " made = new(record)",
        *(f" set_{field.name}(made, {field.name})" for field in fields),
        " return made",
    ]
    exec("\n".join(lines), names)
    return cast(Callable[P, T], names["make"])
