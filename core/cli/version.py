"""`headrace version`: versions of headrace and of the libraries it may use, without importing them."""

import platform
import sys

import click

from .options import json_option
from .output import print_json

PACKAGES = (
    "numpy", "tokenizers", "transformers", "huggingface-hub", "torch", "triton", "jax", "ray",
    "intel-extension-for-pytorch",
)  # fmt: skip


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show versions of headrace and of what it uses."""
    from headrace import __version__

    versions = {
        "headrace": __version__,
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
    }
    if as_json:
        print_json(versions)
        return
    for name, version in versions.items():
        click.echo(f"{name:28} {version or 'not installed'}")


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
