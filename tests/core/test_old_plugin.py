"""A plugin built against interface 1.0 goes on working: arguments that were added since are optional everywhere."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core import hooks
from headrace.core.errors import Unsupported
from headrace.core.models.needs import FEATURES
from headrace.core.ops import OpTable, op_names, select_ops
from headrace.core.ops.drift import adapt
from headrace.core.platform import Caps, OpContext, OpProvider
from headrace.core.plugin_check import new_manager, register
from headrace.core.self_test import tiny_spec

INTERFACE = json.loads((Path(__file__).parents[1] / "support" / "interface_1_0.json").read_text(encoding="utf-8"))
OPS: dict[str, list[tuple[str, str, bool]]] = INTERFACE["ops"]
CONTEXT = OpContext(spec=tiny_spec(), dtype="float32", block_size=16)


def old_op(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation with the signature of 1.0, and nothing more, over a body."""
    kinds = {"positional": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    now = inspect.signature(body).parameters
    arguments, passed, has_star = [], [], False
    for parameter, kind, is_optional in OPS[name]:
        if kinds[kind] is inspect.Parameter.KEYWORD_ONLY and not has_star:
            arguments.append("*")
            has_star = True
        arguments.append(f"{parameter}=now[{parameter!r}].default" if is_optional else parameter)
        passed.append(f"{parameter}={parameter}" if has_star else parameter)
    names: dict[str, Any] = {"now": now, "body": body}
    exec(f"def {name}({', '.join(arguments)}):\n    return body({', '.join(passed)})", names)
    return names[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPS)
def test_ops_of_1_0_are_declared_as_then_but_for_optional_arguments(name: str) -> None:
    assert name in op_names(), "an op of 1.0 is gone"
    now = inspect.signature(getattr(OpTable, name)).parameters
    old = {parameter: (kind, is_optional) for parameter, kind, is_optional in OPS[name]}
    assert set(old) <= set(now)
    for parameter in now.values():
        is_optional = parameter.default is not parameter.empty
        if parameter.name not in old:
            assert is_optional, f"{parameter.name} was added to {name} and is not optional"
            continue
        kind, was_optional = old[parameter.name]
        assert is_optional or not was_optional, f"{parameter.name} of {name} must be given now"
        assert kind == "keyword" or parameter.kind is not parameter.KEYWORD_ONLY
    by_place = [parameter for parameter, kind, _ in OPS[name] if kind == "positional"]
    assert [p for p in now if now[p].kind is not inspect.Parameter.KEYWORD_ONLY][: len(by_place)] == by_place


@pytest.mark.parametrize("name", INTERFACE["hooks"])
def test_hooks_of_1_0_give_what_they_gave(name: str) -> None:
    assert set(INTERFACE["hooks"][name]) <= set(inspect.signature(getattr(hooks, name)).parameters)


def test_an_old_hook_is_called_although_it_knows_fewer_arguments() -> None:
    class Old:
        @hooks.hookimpl
        def headrace_op_providers(self, platform: str) -> str:
            return platform

    manager = new_manager()
    register(manager, Old(), "old")
    assert manager.hook.headrace_op_providers(platform="chip", device=None) == ["chip"]


def test_a_whole_table_of_old_ops_gives_the_reference_tokens() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from headrace.core.config import DeviceConfig, EngineConfig
    from headrace.core.devices import open_device
    from headrace.core.runner.torch import TorchDevice
    from headrace.core.self_test import Driver, load_runner, tiny_config

    reference = open_device(EngineConfig(device=DeviceConfig(device="reference", threads=1)))

    class Old(TorchDevice):
        def providers(self) -> list[OpProvider]:
            return [OpProvider(name="old", ops={name: old_op(name, getattr(OpTable, name)) for name in OPS})]

        def memory(self) -> Any:
            return reference.memory()

    caps = Caps(dtypes=("float32",), shared_memory=True, features=frozenset(FEATURES))
    old = Old(info=reference.info, caps=caps, torch_device="cpu")
    config, tokens = tiny_config(tiny_spec(window=24, softcap=2.0)), []
    for device in (old, reference):
        runner = load_runner(device, config)
        if device is old:
            assert {s.provider for s in runner.op_selections if s.op in OPS} == {"old"}
        tokens.append(Driver(runner, config).generate([3, 1, 4, 1, 5, 9], 8))
    assert tokens[0] == tokens[1]


# ---- the seam itself ------------------------------------------------------------------------------------------
def declared(x: int, y: int = 0, z: int | None = None, *, scale: float, window: int = 0) -> tuple[Any, ...]:
    return x, y, z, scale, window


def test_a_newer_argument_is_left_out_while_it_has_its_default() -> None:
    served = adapt("op", "old", lambda x, y=0, *, scale: (x, y, scale), declared)
    assert served(1, 2, scale=3.0) == served(1, 2, None, scale=3.0, window=0) == (1, 2, 3.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"), [((1, 2, 5), {}, "z"), ((1,), {"window": 4}, "window"), ((1,), {"z": 5}, "z")]
)
def test_a_newer_argument_with_a_value_is_an_error(args: Any, kwargs: Any, name: str) -> None:
    served = adapt("attend", "old", lambda x, y=0, *, scale: x, declared)
    with pytest.raises(Unsupported, match=f"op attend of old is older than its argument {name}"):
        served(*args, scale=1.0, **kwargs)


@pytest.mark.parametrize(
    "implementation", [declared, max, lambda *args, **kwargs: args], ids=["same", "builtin", "any"]
)
def test_others_are_called_as_they_are(implementation: Callable[..., Any]) -> None:
    assert adapt("op", "new", implementation, declared) is implementation


def test_an_op_of_today_is_not_wrapped() -> None:
    table, _ = select_ops([OpProvider(name="own", ops={"add": OpTable.add})], CONTEXT)
    assert table.add is OpTable.add
