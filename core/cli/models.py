"""`headrace models`: the models in the caches, with size and fit."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from ..errors import HeadraceError, PlatformError
from ..units import format_bytes
from .options import engine_config, engine_options_without, json_option
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..hub import CachedModel
    from ..memory_plan import Target


@click.command()
@engine_options_without("revision", "chat_template", "lora", "prefix_caching", "seed")
@json_option
def command(flags: dict[str, Any], as_json: bool) -> None:
    """List the models in the caches, with size and fit."""
    config = engine_config(flags)

    from ..hub import cached_models

    found = cached_models()
    with ExitStack() as stack:
        target = _target(config, stack) if found else None
        fits = [cached.missing or _fit(config, cached, target) for cached in found]
    if as_json:
        print_json(
            [
                {"name": c.model.name, "path": str(c.model.path), "num_bytes": c.num_bytes, "fit": fit}
                for c, fit in zip(found, fits, strict=True)
            ]
        )
    elif not found:
        click.echo("no model is cached; `headrace download` fetches the default one", err=True)
    else:
        rows = [
            (c.model.name, format_bytes(c.num_bytes), fit, str(c.model.path))
            for c, fit in zip(found, fits, strict=True)
        ]
        print_table(("model", "size", "fit", "path"), rows, numbers=("size",))


def _target(config: "EngineConfig", stack: ExitStack) -> "Target | None":
    """The device, opened until the stack ends: what weights take is for it to say."""
    from ..devices import open_device
    from ..memory_plan import Target

    try:
        device = open_device(config)
    except PlatformError:
        return None
    stack.callback(device.close)
    return Target(name=device.info.id, memory=device.memory(), caps=device.caps, device=device)


def _fit(config: "EngineConfig", cached: "CachedModel", target: "Target | None") -> str:
    from ..memory_plan import plan_local

    if target is None:
        return "unknown: no usable device"
    try:
        plan = plan_local(config, cached.model, target)
    except HeadraceError as error:
        return error.reason
    if not plan.fits:
        return f"does not fit on {target.name}"
    return f"fits on {target.name} ({format_bytes(plan.weights_bytes)} + KV)"
