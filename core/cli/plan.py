"""`headrace plan`: the memory table of a model, whether it fits, and how fast it can be at most."""

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from ..errors import CapacityError
from ..units import format_bytes, parse_bytes
from .options import engine_config, engine_options_without, json_option
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..memory_plan import MemoryPlan


@click.command()
@click.argument("model", default=None, required=False)
@click.option("--memory", metavar="SIZE", help="Plan for this much free memory instead of a device that is here.")
@click.option("--bandwidth", metavar="SIZE", help="Memory bandwidth per second, such as 25GB: predicts decode speed.")
@engine_options_without("chat_template", "prefix_caching", "seed")
@json_option
def command(
    model: str | None, memory: str | None, bandwidth: str | None, flags: dict[str, Any], as_json: bool
) -> None:
    """Show what a model needs and whether it fits; loads nothing.

    Only the configuration of a hub model is fetched, never its weights. Exits with 4 if it does not fit.
    """
    config = engine_config(flags, model=model)
    bandwidth_bytes = parse_bytes(bandwidth, name="--bandwidth") if bandwidth else None
    memory_bytes = parse_bytes(memory, name="--memory") if memory else None

    from ..devices import open_device
    from ..memory_plan import Target, device_target, plan_model
    from ..platform import Memory

    if memory_bytes is not None:
        described = Memory(total_bytes=memory_bytes, free_bytes=memory_bytes)
        plan = plan_model(config, Target(name="the given memory", memory=described), _report)
    else:
        device = open_device(config)
        try:
            plan = plan_model(config, device_target(device), _report)
        finally:
            device.close()
    if as_json:
        print_json({**dataclasses.asdict(plan), "fits": plan.fits, **_speed(plan, bandwidth_bytes)})
    else:
        _print(plan, bandwidth_bytes)
    if not plan.fits:
        raise CapacityError(plan.problem, remedies=plan.remedies)


def _print(plan: "MemoryPlan", bandwidth: int | None) -> None:
    click.echo(f"{plan.model}: {plan.model_type}, {plan.num_layers} layers, {plan.num_params / 1e6:.1f} M parameters")
    click.echo(f"on {plan.target}: {format_bytes(plan.free_bytes)} of {format_bytes(plan.total_bytes)} free\n")
    quantized = "" if plan.quantize == "none" else f"{plan.quantize}; the rest "
    rows = [["weights", format_bytes(plan.weights_bytes), f"{quantized}{plan.dtype} ({plan.dtype_reason})"]]
    for group in plan.groups:
        window = f", window {group.window}" if group.window else ""
        per_block = f"{format_bytes(group.block_bytes)} a block of {plan.block_size}; {group.num_blocks} blocks"
        if group.kind == "state":
            what, size, per_block = "state", group.block_bytes, f"room for {group.num_blocks}, checkpoints included"
        elif group.kind == "cross":
            what, size = "KV per encoder token", group.token_bytes
        else:
            what, size = f"KV per token, {group.kind}", group.token_bytes
        rows.append([what, format_bytes(size), f"{group.num_layers} layers{window}; {per_block}"])
    rows.append(["KV of one request", format_bytes(plan.request_bytes), f"{plan.max_model_len} tokens"])
    if plan.fits:
        at_once = f"{plan.kv_dtype}, {plan.concurrency:.1f} such requests at once (at most {plan.max_num_seqs} run)"
        rows.append(["KV cache", format_bytes(plan.kv_bytes), at_once])
        left = plan.free_bytes - plan.weights_bytes - plan.kv_bytes - plan.step_bytes
        if plan.step_bytes:
            rows.append(["activations", format_bytes(plan.step_bytes), "of the largest step"])
        rows.append(
            [
                "left",
                format_bytes(left),
                "for everything else" if plan.step_bytes else "for activations and everything else",
            ]
        )
    print_table(("what", "size", ""), rows, numbers=("size",))
    speed = _speed(plan, bandwidth)
    if speed:
        click.echo(
            f"\ndecode, one stream: at most {speed['max_decode_tokens_per_s']:.1f} tokens/s "
            f"({format_bytes(plan.read_bytes)} of weights a token at {format_bytes(bandwidth or 0)}/s)"
        )
    click.echo(f"\n{'fits' if plan.fits else 'does not fit'}")


def _speed(plan: "MemoryPlan", bandwidth: int | None) -> dict[str, float]:
    if bandwidth is None:
        return {}
    return {"max_decode_tokens_per_s": plan.max_decode_tokens_per_s(bandwidth)}


def _report(line: str) -> None:
    click.echo(line, err=True)
