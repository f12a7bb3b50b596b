"""`headrace conformance`: run the conformance kit on a device."""

from collections import Counter
from collections.abc import Sequence

import click

from .exits import SELF_TEST_FAILED
from .options import json_option
from .output import print_json


@click.command()
@click.option("--device", required=True, metavar="DEVICE", help="Platform with optional ids, as in --device.")
@click.option("--select", default="", metavar="TEXT", help="Run only the checks whose names contain TEXT.")
@json_option
def command(device: str, select: str, as_json: bool) -> None:
    """Run the conformance kit on a device.

    Unsupported is not a failure. Exit code 7 if a check failed.
    """
    from ..conformance import Check
    from ..errors import ConfigError, PluginError
    from ..plugin_loader import load_plugins

    plugins = load_plugins()
    checks: Sequence[Check] | None = plugins.hooks.headrace_conformance(
        device=device, select=select, report=lambda line: click.echo(line, err=as_json)
    )
    if checks is None:
        raise PluginError("no plugin brings a conformance kit", remedies=["pip install --force-reinstall headrace"])
    if not checks:
        raise ConfigError(f"no check's name contains {select!r}", remedies=["headrace conformance without --select"])
    counts = Counter(check.outcome for check in checks)
    if as_json:
        listed = [{"name": check.name, "outcome": check.outcome, "detail": check.detail} for check in checks]
        print_json({"device": device, "counts": dict(counts), "checks": listed})
    else:
        click.echo(
            f"{device}: {counts['passed']} passed, {counts['failed']} failed, {counts['unsupported']} unsupported"
        )
        for check in checks:
            if check.outcome == "failed":
                click.echo(f"  failed {check.name}: {check.detail}")
    if counts["failed"]:
        raise click.exceptions.Exit(SELF_TEST_FAILED)
