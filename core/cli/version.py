"""`headrace version`: versions of headrace and of the libraries it may use, without importing them."""

import platform
import re
import sys

import click

from .options import json_option
from .output import print_json

_ALWAYS = ("numpy", "tokenizers", "transformers", "torch")
"""shown even if headrace runs from a checkout that was not installed"""


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show versions of headrace and of what it uses."""
    from headrace import __version__

    versions = {
        "headrace": __version__,
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        **{name: _version(name) for name in _packages()},
    }
    if as_json:
        print_json(versions)
        return
    for name, version in versions.items():
        click.echo(f"{name:28} {version or 'not installed'}")


def _packages() -> list[str]:
    """What headrace and its extras require, as its own metadata lists it; tools for developers left out."""
    from importlib import metadata

    try:
        requirements = metadata.requires("headrace") or []
    except metadata.PackageNotFoundError:
        requirements = []
    used = [line for line in requirements if not re.search(r"extra\s*==\s*.dev.", line)]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in used]
    return sorted({*_ALWAYS, *names})


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
