"""`headrace doctor`: use a device for real, and say which provider serves each op."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from .exits import SELF_TEST_FAILED
from .options import engine_config, engine_options_without, json_option
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..ops import Selection
    from ..platform import Device, Gap


@click.command()
@click.option("--ops", "show_ops", is_flag=True, help="List the provider of each op, and why others declined.")
@click.option("--model", metavar="MODEL", help="Choose op providers as for this model; loads no weights.")
@engine_options_without("chat_template", "lora", "prefix_caching", "speculative", "seed")
@json_option
def command(flags: dict[str, Any], show_ops: bool, model: str | None, as_json: bool) -> None:
    """Try a device for real: allocate, multiply, generate with a tiny model.

    Exit code 7 if something failed.
    """
    from ..devices import open_device
    from ..self_test import self_test

    config = engine_config(flags, model=model)
    device = open_device(config)
    try:
        checks = list(self_test(device))
        selections, gaps = _selections(device, config, for_model=model is not None)
    finally:
        device.close()
    failed = [check for check in checks if check.outcome == "failed"]
    if as_json:
        print_json(
            {
                "device": device.info.id,
                "name": device.info.name,
                "arch": device.info.arch,
                "facts": dict(device.describe()),
                "checks": [{"name": c.name, "outcome": c.outcome, "detail": c.detail} for c in checks],
                "gaps": [{"feature": g.feature, "reason": g.reason, "effect": g.effect} for g in gaps],
                "ops": [
                    {"op": s.op, "provider": s.provider, "declined": [list(pair) for pair in s.declined]}
                    for s in selections
                ],
            }
        )
    else:
        facts = "".join(f", {name} {value}" for name, value in device.describe().items())
        click.echo(f"device {device.info.id}: {device.info.name}{facts}")
        for check in checks:
            click.echo(f"  {check.outcome:12} {check.name:10} {check.detail}")
        for gap in gaps:
            click.echo(f"  {gap.effect:12} {gap.feature:10} {gap.reason}")
        if show_ops or model:
            _print_ops(selections)
        elif selections:
            click.echo(f"  {len(selections)} ops: {_summary(selections)}; --ops lists them")
    if failed:
        raise click.exceptions.Exit(SELF_TEST_FAILED)


def _selections(
    device: "Device", config: "EngineConfig", *, for_model: bool
) -> tuple[list["Selection"], list["Gap"]]:
    """Providers for the tiny model, or for the model of a configuration with the gaps that it meets."""
    from ..self_test import tiny_config, tiny_spec

    if not for_model:
        wanted = tiny_config(tiny_spec(), dtype=device.caps.dtypes[0])
        runner = device.runner(replace(wanted, engine=config))
        gaps: list[Gap] = []
    else:
        from ..engine.build import describe_model
        from ..engine.resolve import resolve_dtype
        from ..models.needs import model_needs

        model = describe_model(config, lambda line: click.echo(line, err=True))
        blocked = model.gguf is not None
        if model.gguf is not None:
            model.gguf.close()
        dtype = resolve_dtype(config.model.dtype, model.spec, device.caps, blocked=blocked)
        wanted = tiny_config(model.spec, dtype=dtype.value, block_size=config.kv.block_size)
        runner = device.runner(replace(wanted, engine=config))
        gaps = device.check(model_needs(model.spec))
    try:
        return list(runner.op_selections), gaps
    finally:
        runner.close()


def _print_ops(selections: list["Selection"]) -> None:
    if not selections:
        click.echo("  this device's runner brings everything itself: there is no table of ops")
        return
    rows = [
        [s.op, s.provider, "; ".join(f"{provider}: {reason}" for provider, reason in s.declined)] for s in selections
    ]
    print_table(("op", "provider", "declined"), rows)


def _summary(selections: list["Selection"]) -> str:
    counts: dict[str, int] = {}
    for selection in selections:
        counts[selection.provider] = counts.get(selection.provider, 0) + 1
    return ", ".join(f"{count} by {provider}" for provider, count in counts.items())
