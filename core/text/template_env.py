"""The sandbox in which chat templates run: what they are written for, and limits on time and on what they make.

A template may come from anywhere, and a loop or a string that doubles would hold up a server for ever.
"""

import functools
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

_LIMIT_S = 5.0
"""Of a processor's time, for one rendering; the longest conversations take a tenth of it."""
_LIMIT_CHARS = 64 * 1024**2
"""Characters that a rendering prints, and that one of its values has."""
_BITS = 10_000
"""Of a whole number."""
_CHARS_OF_AN_ITEM = 8
"""What an item of a list counts for."""
_STEPS_PER_LOOK = 64
_WIDTH = re.compile(r"\d{7}|\*")
_UNUSED = ("urlize", "xmlattr", "lipsum")
"""Of what Jinja has, what makes much of little and is for pages of the web."""


class Refused(Exception):
    """A template called raise_exception."""


class LimitExceeded(Exception):
    """A template takes too long, or makes too much; the text goes on after "the chat template"."""


class _Spent:
    """What one rendering has taken."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_chars = 0
        self.end_s = time.thread_time() + _LIMIT_S

    def add(self, num_chars: int) -> None:
        """One step more. Raises LimitExceeded."""
        self.num_chars += num_chars
        self.num_steps += 1
        if self.num_chars > _LIMIT_CHARS:
            raise LimitExceeded(f"prints more than {_LIMIT_CHARS} characters")
        if self.num_steps % _STEPS_PER_LOOK == 0 and time.thread_time() > self.end_s:
            raise LimitExceeded(f"runs for more than {_LIMIT_S:.0f} s")


_spent: ContextVar[_Spent] = ContextVar("spent")


@contextmanager
def limits() -> Iterator[None]:
    """In the block, templates of `make_environment` may be rendered. Raises LimitExceeded."""
    token = _spent.set(_Spent())
    try:
        yield
    finally:
        _spent.reset(token)


def limit_loops(tree: "jinja2.nodes.Template") -> "jinja2.nodes.Template":
    """The template with counters in its loops and macros, and checks of the values that it puts together."""
    import jinja2.nodes as nodes
    from jinja2.visitor import NodeTransformer

    class Limit(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(num_chars), "_spend")))
            return node

        visit_Macro = visit_CallBlock = visit_For

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            is_target = getattr(node, "ctx", "load") != "load"
            return node if is_target or _is_constant(node) else _filter(node, "_sized")

        visit_List = visit_Tuple = visit_Dict = visit_Concat

    def _filter(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None)

    def _is_constant(node: Any) -> bool:
        try:
            node.as_const()
        except nodes.Impossible:
            return False
        return True

    limited: nodes.Template = Limit().visit(tree)
    return limited


def make_environment() -> "jinja2.Environment":
    """What templates on the Hugging Face hub are written for, with limits. Where they end: `limits`."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the assistant says, for training; here it is only its body."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """A namespace that stores no name by which a template could reach the interpreter."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **kwargs: Any) -> Namespace:
        made = Namespace()
        for name, value in dict(*args, **kwargs).items():
            made[name] = value
        return made

    def raise_exception(message: str) -> None:
        raise Refused(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes characters for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Sandbox(ImmutableSandboxedEnvironment):
        """One whose operators and calls make nothing huge."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _spent.get().add(0)
            owner = getattr(inspect.unwrap(function), "__self__", None)  # the sandbox wraps `format`
            if isinstance(owner, str):
                _check_text(function.__name__, owner, [*args, *kwargs.values()])
            else:
                _check_size(_size([args, kwargs]))
            return super().call(context, function, *args, **kwargs)

    @jinja2.pass_context  # what has it is not worked out once for all
    def finalize(_context: Any, value: Any) -> str:
        text = str(value)
        _spent.get().add(len(text))
        return text

    @jinja2.pass_context
    def spend(_context: Any, num_chars: int) -> None:
        _spent.get().add(num_chars)

    @jinja2.pass_context
    def sized(_context: Any, value: Any) -> Any:
        _check_size(_size(value))
        return value

    def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def filter(*args: Any, **kwargs: Any) -> Any:
            at = 1 if hasattr(function, "jinja_pass_arg") else 0
            text, others = args[at], [*args[at + 1 :], *kwargs.values()]
            if name == "join":
                items = list(text)
                text, others, args = str((others or [""])[0]), [items], (*args[:at], items, *args[at + 1 :])
            _check_text(name, text, others)
            return function(*args, **kwargs)

        return filter

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    for name in ("replace", "join", "center", "indent", "wordwrap", "format", "tojson", "truncate"):
        environment.filters[name] = checked(name, environment.filters[name])
    for name in _UNUSED:
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.filters.update(_spend=spend, _sized=sized)
    environment.globals["namespace"] = namespace
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _size(value: Any, known: dict[int, int] | None = None) -> int:
    """Characters and items of a value, those that it holds twice counted twice."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | Mapping):
        return 1
    known = {} if known is None else known
    size = known.get(id(value))
    if size is None:
        items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        size = known[id(value)] = _CHARS_OF_AN_ITEM + sum(_size(item, known) for item in items)
    return size


def _check_size(size: float) -> None:
    if size > _LIMIT_CHARS:
        raise LimitExceeded(f"makes a value of more than {_LIMIT_CHARS} characters or items")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise LimitExceeded for what an operator would make too much of."""
    for many, other in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple):
            weight = 1 if isinstance(many, str) else _CHARS_OF_AN_ITEM
            if operator == "+" and isinstance(other, str | list | tuple):
                _check_size((len(many) + len(other)) * weight)
            elif operator == "*" and isinstance(other, int):
                _check_size(len(many) * other * weight)
    if operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        if (
            bits := left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        ) > _BITS:
            raise LimitExceeded(f"makes a number of {bits:.3g} bits")


def _check_format(form: str, *values: Any) -> None:
    if _WIDTH.search(form):
        raise LimitExceeded("writes something with a width of millions")
    _check_size(len(form) + (form.count("%") + form.count("{")) * sum(map(_size, values)))


def _check_text(name: str, text: Any, args: Sequence[Any]) -> None:
    """Raise LimitExceeded for a method or filter of texts that would make too much of its arguments."""
    for number in args:
        if isinstance(number, int) and number > _LIMIT_CHARS // 64:
            raise LimitExceeded(f"calls {name} with {number:.3g}")
    if name == "replace" and len(args) > 1 and all(isinstance(part, str) for part in (text, *args[:2])):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name in ("format", "format_map"):
        _check_format(str(text), *args)
    elif name == "join" and isinstance(text, str) and args and isinstance(args[0], list | tuple):
        _check_size(_size(args[0]) + len(text) * len(args[0]))
