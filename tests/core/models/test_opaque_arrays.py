"""A lint: code over models touches arrays through ops alone, so that any runner can trace or replay it.

It follows kinds of values through a module by its annotations: what ops return, what `params` and the batch hold
and what is annotated `Array` is an array, and an array may only be named, passed on, packed into a tuple, list or
record, and compared to None. Records are the dataclasses of core/stages.py and core/models that hold arrays or ops;
what their methods return is what these are annotated with, and their bodies are checked like all others.
"""

import ast
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import pytest

from headrace.core import models, stages
from headrace.core.ops import OpTable, op_names

MODELS = Path(models.__path__[0])


@dataclass(frozen=True)
class Kind:
    """What a value is. items: the parts of a "tuple", or the one element of a "container"; name: of a record."""

    tag: str
    items: tuple["Kind", ...] = ()
    name: str = ""

    @property
    def holds_array(self) -> bool:
        return self.tag in ("array", "record") or any(item.holds_array for item in self.items)

    @property
    def element(self) -> "Kind":
        """What a loop over it gives, or unpacking."""
        return next((item for item in self.items if item != PLAIN), PLAIN)


PLAIN, ARRAY, OPS = Kind("plain"), Kind("array"), Kind("ops")
MANY_ARRAYS = Kind("container", (ARRAY,))
CONTAINERS = ("Mapping", "dict", "Sequence", "list", "Iterable", "Iterator")


@dataclass
class Module:
    """What the annotations of one module promise."""

    aliases: dict[str, ast.expr] = field(default_factory=dict)
    returns: dict[str, Kind] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    num_op_calls: int = 0

    def annotated(self, node: ast.expr | None) -> Kind:
        """The kind of an annotation."""
        match node:
            case ast.Name("Array"):
                return ARRAY
            case ast.Name("OpTable"):
                return OPS
            case ast.Name(name) if name in RECORDS:
                return Kind("record", name=name)
            case ast.Name(name) if name in self.aliases:
                return self.annotated(self.aliases[name])
            case ast.Constant(str(text)):
                return self.annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(left, ast.BitOr(), right):
                left_kind = self.annotated(left)
                return left_kind if left_kind != PLAIN else self.annotated(right)
            case ast.Subscript(ast.Name("tuple"), ast.Tuple([item, ast.Constant(value)])) if value is ...:
                return container(self.annotated(item))
            case ast.Subscript(ast.Name("tuple"), ast.Tuple(items)):
                return bundle([self.annotated(item) for item in items])
            case ast.Subscript(ast.Name(name), ast.Tuple([*_, item]) | item) if name in CONTAINERS:
                return container(self.annotated(item))
        return PLAIN


def container(item: Kind) -> Kind:
    return Kind("container", (item,)) if item != PLAIN else PLAIN


def bundle(items: list[Kind]) -> Kind:
    return Kind("tuple", tuple(items)) if any(item != PLAIN for item in items) else PLAIN


RECORDS: dict[str, Mapping[str, Kind]] = {}
"""Kinds of the fields and properties of each record."""
METHODS: dict[tuple[str, str], Kind] = {}
"""What methods of records return."""


def read_records(path: Path) -> None:
    """Find the records of a module, as far as those that it is made of are known."""
    module, tree = Module(), parsed(path)
    learn_neighbours(module, tree)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = {
            item.target.id: module.annotated(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        if all(kind == PLAIN for kind in fields.values()):
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                if any(isinstance(name, ast.Name) and name.id == "property" for name in item.decorator_list):
                    fields[item.name] = module.annotated(item.returns)
                else:
                    METHODS[node.name, item.name] = module.annotated(item.returns)
        RECORDS[node.name] = fields


def learn_neighbours(module: Module, tree: ast.Module) -> None:
    """What a module has from others of its folder, and its own names for types."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and (MODELS / f"{node.module}.py").exists():
            learn(module, parsed(MODELS / f"{node.module}.py"), {alias.name for alias in node.names})
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.aliases[node.targets[0].id] = node.value


def op_result(name: str) -> Kind:
    """The kind that an op returns, by its declaration."""
    returned = inspect.signature(getattr(OpTable, name)).return_annotation
    if get_origin(returned) is not tuple:
        return ARRAY
    args = returned.__args__
    return MANY_ARRAYS if args[-1] is ... else Kind("tuple", (ARRAY,) * len(args))


def lint(source: str) -> Module:
    """Every use of an array outside ops."""
    tree, module = ast.parse(source), Module()
    learn_neighbours(module, tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    owners = {id(item): node.name for node in tree.body if isinstance(node, ast.ClassDef) for item in node.body}
    for function in functions:
        if id(function) not in owners:
            module.returns[function.name] = module.annotated(function.returns)
    for function in functions:
        checked, owner = Function(module, function), owners.get(id(function), "")
        if owner in RECORDS:
            checked.names["self"] = Kind("record", name=owner)
        checked.check()
    return module


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def learn(module: Module, tree: ast.Module, names: set[str]) -> None:
    """What the annotations of a neighbour promise of the names that a module imports from it."""
    neighbour = Module()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            neighbour.aliases[node.targets[0].id] = node.value
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            module.returns[node.name] = neighbour.annotated(node.returns)
    module.aliases.update({name: value for name, value in neighbour.aliases.items() if name in names})


for _ in range(4):  # records are made of records
    for _path in (Path(stages.__file__), *sorted(MODELS.glob("*.py"))):
        read_records(_path)


class Function:
    """Kinds of the names of one function. A name that ever holds an array counts as an array everywhere."""

    def __init__(self, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.module, self.node = module, node
        arguments = node.args
        self.names = {
            argument.arg: module.annotated(argument.annotation)
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        }

    def check(self) -> None:
        before, calls = list(self.module.violations), self.module.num_op_calls
        self.block(self.node.body)  # learns names that a loop assigns after their first use
        self.module.violations, self.module.num_op_calls = before, calls
        self.block(self.node.body)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets, value):
                kind = self.kind(value)
                for target in targets:
                    self.assign(target, kind)
            case ast.AnnAssign(target, annotation, value):
                if value is not None:
                    self.kind(value)
                self.assign(target, self.module.annotated(annotation))
            case ast.AugAssign(target, _, value):
                self.plain(target, "is changed in place")
                self.plain(value, "is used in an augmented assignment")
            case ast.Return(value) | ast.Expr(value):
                if value is not None:
                    self.kind(value)
            case ast.If(test, body, orelse) | ast.While(test, body, orelse):
                self.plain(test, "is used as a condition")
                self.block(body)
                self.block(orelse)
            case ast.For(target, iterable, body, orelse):
                self.assign(target, self.element(iterable))
                self.block(body)
                self.block(orelse)
            case ast.FunctionDef():
                inner = Function(self.module, node)
                inner.names = {**self.names, **inner.names}
                inner.check()
            case _:
                self.children(node)

    def children(self, node: ast.AST) -> None:
        """Any other statement: what it holds is checked, and may not be an array."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.plain(child, f"is used in {type(node).__name__.lower()}")
            elif isinstance(child, ast.stmt):
                self.statement(child)
            else:
                self.children(child)

    def assign(self, target: ast.expr, kind: Kind) -> None:
        match target:
            case ast.Name(name):
                if kind != PLAIN or name not in self.names:
                    self.names[name] = kind
            case ast.Tuple(items) | ast.List(items):
                if kind == ARRAY:
                    self.report(target, "is unpacked")
                parts = kind.items if kind.tag == "tuple" else (kind.items or (PLAIN,)) * len(items)
                for item, part in zip(items, parts, strict=False):
                    self.assign(item, part)
            case ast.Starred(value):
                self.assign(value, container(kind))
            case ast.Subscript(value, index):
                if self.kind(value) == ARRAY:
                    self.report(target, "is written to")
                self.plain(index, "is used as an index")
            case _:
                self.kind(target)

    def kind(self, node: ast.expr) -> Kind:
        """The kind of an expression; reports each forbidden use inside it."""
        match node:
            case ast.Name(name):
                return self.names.get(name, PLAIN)
            case ast.Attribute(value, attr):
                owner = self.kind(value)
                if owner == ARRAY:
                    self.report(node, f"has its attribute {attr} read")
                return RECORDS[owner.name].get(attr, PLAIN) if owner.tag == "record" else PLAIN
            case ast.Subscript(value, index):
                owner = self.kind(value)
                self.plain(index, "is used as an index")
                if owner == ARRAY:
                    self.report(node, "is subscripted")
                if owner.tag == "tuple" and isinstance(index, ast.Constant) and isinstance(index.value, int):
                    return owner.items[index.value]
                return owner.items[0] if owner.items else PLAIN
            case ast.Call():
                return self.call(node)
            case ast.IfExp(test, body, orelse):
                self.plain(test, "is used as a condition")
                kind, other = self.kind(body), self.kind(orelse)
                return kind if kind != PLAIN else other
            case ast.Tuple(items):
                return self.packed(items)
            case ast.Starred(value):
                kind = self.kind(value)
                if kind == ARRAY:
                    self.report(node, "is unpacked")
                return kind
            case ast.List(items):
                return container(self.packed(items).element)
            case ast.Compare(left, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                self.kind(left)
                return PLAIN
            case ast.Compare(left, [ast.In() | ast.NotIn()], [right]):
                self.plain(left, "is searched for")
                if self.kind(right) == ARRAY:
                    self.report(node, "is searched")
                return PLAIN
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self.comprehension(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.plain(child, f"is used in {type(node).__name__.lower()}")
        return PLAIN

    def packed(self, items: list[ast.expr]) -> Kind:
        """Of a tuple or a list, in which starred parts stand for their elements."""
        kinds = [(item, self.kind(item)) for item in items]
        return bundle([kind.element if isinstance(item, ast.Starred) else kind for item, kind in kinds])

    def call(self, node: ast.Call) -> Kind:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        match node.func:
            case ast.Attribute(value, op) if self.kind(value) == OPS:
                if op not in op_names():
                    self.module.violations.append(f"line {node.lineno}: there is no op {op}")
                    return ARRAY
                for argument in arguments:
                    self.kind(argument)
                self.module.num_op_calls += 1
                return op_result(op)
            case ast.Attribute(value, method) if (self.kind(value).name, method) in METHODS:
                for argument in arguments:
                    self.kind(argument)
                return METHODS[self.kind(value).name, method]
            case ast.Name("enumerate"):
                return container(bundle([PLAIN, self.element(node.args[0])]))
            case ast.Name("zip"):
                return container(bundle([self.element(argument) for argument in node.args]))
            case ast.Name("list" | "tuple") if self.kind(arguments[0]).tag == "container":
                return self.kind(arguments[0])
            case ast.Name("replace") if (record := self.kind(arguments[0])).tag == "record":
                for argument in arguments:
                    self.kind(argument)
                return record
            case ast.Name("isinstance" | "type") if self.kind(arguments[0]).tag in ("record", "container"):
                return PLAIN
            case ast.Attribute(value, "append" | "get" | "items" | "values" | "keys" as method):
                owner_kind = self.kind(value)
                if owner_kind == ARRAY:
                    self.report(node, f"has its method {method} called")
                for argument in arguments:
                    self.kind(argument)
                if owner_kind.tag == "container":
                    return {"get": owner_kind.items[0], "append": PLAIN, "keys": PLAIN}.get(method, owner_kind)
                return PLAIN
            case ast.Name(name) if name in self.module.returns:
                for argument in arguments:
                    self.kind(argument)
                return self.module.returns[name]
            case ast.Name(name) if name in RECORDS:
                for argument in arguments:
                    self.kind(argument)
                return Kind("record", name=name)
            case ast.Name("len") if self.kind(arguments[0]).tag == "container":
                return PLAIN
        self.plain(node.func, "is called")
        for argument in arguments:
            self.plain(argument, "is passed to a function that is no op")
        return PLAIN

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Kind:
        for generator in node.generators:
            self.assign(generator.target, self.element(generator.iter))
            for test in generator.ifs:
                self.plain(test, "is used as a condition")
        if isinstance(node, ast.DictComp):
            self.plain(node.key, "is used as a key")
            return container(self.kind(node.value))
        return container(self.kind(node.elt))

    def element(self, iterable: ast.expr) -> Kind:
        """What a loop over an expression gives."""
        kind = self.kind(iterable)
        if kind == ARRAY:
            self.report(iterable, "is iterated over")
        return kind.element

    def plain(self, node: ast.expr, use: str) -> None:
        """Check an expression that must neither be nor hold an array."""
        if self.kind(node).holds_array:
            self.report(node, use)

    def report(self, node: ast.AST, use: str) -> None:
        line = getattr(node, "lineno", self.node.lineno)
        self.module.violations.append(f"line {line}: the array in `{ast.unparse(node)}` {use}")


@pytest.mark.parametrize("path", sorted(MODELS.rglob("*.py")), ids=lambda path: path.name)
def test_models_touch_arrays_through_ops_alone(path: Path) -> None:
    assert lint(path.read_text()).violations == []


def test_the_lint_sees_the_decoder() -> None:
    """Were the annotations not understood, everything would be plain and nothing forbidden."""
    names = ("decoder", "layers", "attention", "memory", "scope", "mixer", "feed_forward")
    sources = [(MODELS / f"{name}.py").read_text() for name in names]
    assert sum(lint(source).num_op_calls for source in sources) >= 50
    changed = [
        ("block = attention(at", "block = (lambda *x: x)(at"),
        ("return self.ops.rms_norm(x, weight, eps=norm.eps)", "return x * weight"),
        ("at.ops.add(self.block, self.residual), None", "self.block + self.residual, None"),
        ("hidden_states = walk(scope", "hidden_states = -walk(scope"),
        ("layers=[*kv.layers]", "layers=[kv.layers[0][0]]"),
        ("cos, sin = angles[number]", "cos, sin = (angles[number][0].T, None)"),
        ("batch.block_tables[group],", "batch.block_tables[group][:1],"),
        ("batch.seq_lens,", "batch.seq_lens.max(),"),
        (
            "value = _widen(at, ops.split_heads(own[-1], head_dim=size), size, attn.head_dim)",
            "value = own[-1].view(-1, 1, 2)",
        ),
        ("at.ops.rope(x, sight.cos", "at.ops.rope(x, sight.cos * 2"),
        ("return ops.merge_heads(y)", "return self.states[0] + y"),
        ("x = r.convolve(x)", "x = r.convolve(x) * 2"),
    ]
    for good, bad in changed:
        source = next((source for source in sources if good in source), "")
        assert source, good
        assert lint(source.replace(good, bad)).violations, bad


HEAD = """
def helper(ops: OpTable, x: Array) -> tuple[Array, Array]:
    return x, x

def f(
    ops: OpTable, params: Mapping[str, Array], batch: ForwardBatch, kv: KVCaches, at: Scope, stream: Stream, x: Array,
    n: int,
) -> Array:
"""


EXPRESSIONS = """
x + 1 | -x | x @ x | x == x | not x | x and n | x[0] | x[:, None] | x.shape | x.T | x.view(3) | len(x) | float(x)
print(x) | f"{x}" | x() | [y for y in x] | {n: n for y in x} | x in [1] | n in x | n + (x if n else x) | n[x]
params["a"] * 2 | params.get("a") * 2 | batch.positions + 1 | -batch.block_tables[0] | kv.layers[0][1]
sum(kv.layers) | (x, x) + (n,) | [x] * 2 | ops.add(x, x) + 1 | ops.add(x, x)[0] | ops.add(x + 1, x)
ops.add(x, y=x.T) | ops.split(x, (1, 2))[0] + n | ops.add_rms_norm(x, x, None, eps=n)[1].T | helper(ops, x)[0] * 2
helper(ops, x * 2) | (lambda y: y)(x) | (lambda: x.T)() | ops.mystery(x) | slice(x) | (z := x).T | print(*x)
ops.add(*x) | at.linear("a", x) + 1 | at.ops.add(x, x).T | at.inside("b").param("c") * 2 | stream.residual.T
stream.read(at, "a")[0] | [y.T for _, y in zip(n, kv.layers)] | replace(kv, layers=[x]).layers[0].T | len([*x])
"""


@pytest.mark.parametrize("body", [e.strip() for line in EXPRESSIONS.split("\n") if line for e in line.split(" | ")])
def test_the_lint_forbids(body: str) -> None:
    assert lint(f"{HEAD}    y = {body}\n").violations


STATEMENTS = (
    "x += 1",
    "n += x",
    "x[0] = 1",
    "a, b = x",
    "a, *b = x",
    "a = b = x\n    c = b.T",
    "if x: pass",
    "while x: pass",
    "for y in x: pass",
    "for y in kv.layers: y.T",
    "for p in range(n):\n        y.T\n        y = x",
    "y: Array = None\n    y.T",
    "a, b = ops.rotary_angles(x, x, x)\n    a * 2",
    "ys = []\n    ys = [x]\n    ys[0].T",
    "(a, b), c = helper(ops, x), n\n    b.T",
    "y = x\n    return y.T",
    "raise ValueError(x)",
    "assert x",
    "with x: pass",
    "try:\n        y = x.T\n    finally: pass",
    "def inner():\n        return x.T",
    "match n:\n        case 1: y = x.T",
)


@pytest.mark.parametrize("body", STATEMENTS)
def test_the_lint_forbids_statements(body: str) -> None:
    assert lint(f"{HEAD}    {body}\n").violations


def test_the_lint_allows_what_the_design_allows() -> None:
    body = """
    y = ops.add(x, params["a"]) if n > 1 else x
    bias = params["b"] if n else None
    a, b = helper(ops, *helper(ops, y))
    q, k, v = ops.split(ops.linear(a, params["w"], bias), (n, n * 2, n))
    tables: dict[int, tuple[Array, Array]] = {}
    if n not in tables:
        tables[n] = ops.rotary_angles(batch.positions, q, k, batch.rope_rows)
    cos, sin = tables[n]
    caches: list[Array] = []
    for i, cache in enumerate(range(n)):
        caches.append(ops.write_kv(kv.layers[i], cos, sin, batch.slot_mappings[kv.group_of_layer[i]]))
    stream.residual, stream.block = at.scaled(at.inside("mlp").linear("up_proj", stream.residual), 2.0), None
    for i, (layer, part) in enumerate(zip(n, [*kv.layers], strict=True)):
        caches[i] = at.ops.add(part, x)
    if y is None or n == batch.max_seq_len + 1:
        return KVCaches(layers=caches, group_of_layer=kv.group_of_layer)
    return [ops.add(cache, cache) for cache in caches]
"""
    module = lint(HEAD + body)
    assert module.violations == [] and module.num_op_calls == 7


def test_records_and_ops_are_understood() -> None:
    assert RECORDS["ForwardBatch"]["positions"] == ARRAY
    assert RECORDS["ForwardBatch"]["block_tables"] == MANY_ARRAYS
    assert RECORDS["ForwardBatch"]["rope_rows"] == ARRAY
    assert RECORDS["ForwardBatch"]["max_seq_len"] == PLAIN
    assert RECORDS["Scope"]["ops"] == OPS and RECORDS["Scope"]["params"] == MANY_ARRAYS
    assert METHODS["Scope", "linear"] == ARRAY and METHODS["Scope", "inside"] == Kind("record", name="Scope")
    assert RECORDS["Sight"]["caches"] == Kind("record", name="Caches") and METHODS["Sight", "attend"] == ARRAY
    results: dict[str, Any] = {name: op_result(name) for name in op_names()}
    assert results["rms_norm"] == ARRAY and results["split"] == MANY_ARRAYS
    assert results["add_rms_norm"] == Kind("tuple", (ARRAY, ARRAY))
