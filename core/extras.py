"""What is said of a package that is not installed: which of headrace's extras brings it."""

import re
from importlib import metadata
from importlib.util import find_spec

from .errors import MissingPackage

EXTRAS = {
    "PIL": ("Pillow", "vision"),
    "transformers": ("transformers", "vision"),
    "soundfile": ("soundfile", "audio"),
    "torch": ("torch", "torch"),
    "matplotlib": ("matplotlib", "bench"),
    "opentelemetry": ("OpenTelemetry", "otel"),
}
"""Modules that only some features import -> what the package is called, and the extra that brings it."""


def extra_remedy(module: str) -> str:
    """The command that installs a module of EXTRAS."""
    return f"pip install 'headrace[{EXTRAS[module][1]}]'"


def images_remedies() -> list[str]:
    """What makes a model with an encoder of images read them: where all else runs without torch, torch."""
    return [] if find_spec("torch") else [extra_remedy("torch")]


def missing_package(error: BaseException, what: str = "this") -> MissingPackage | None:
    """The error to tell in the place of one that a failed import of somebody else's package is, or led to; None for
    any other. what: needs the package."""
    found: BaseException | None = error
    for _ in range(20):
        if isinstance(found, ImportError) or found is None:
            break
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    if not isinstance(found, ImportError) or not found.name:
        return None
    module = found.name.partition(".")[0]
    if module == "headrace":
        return None
    name, remedy = module, f"install the package that has the module {module}"
    if module in EXTRAS:
        name, remedy = EXTRAS[module][0], extra_remedy(module)
    elif module in _own_requirements():
        remedy = "pip install --force-reinstall headrace, which needs it always"
    if isinstance(found, ModuleNotFoundError):
        return MissingPackage(f"{what} needs {name}, which is not installed", remedies=[remedy])
    # Of another version, or without a library of the system.
    return MissingPackage(f"{what} needs {name}, which cannot be imported: {found}", remedies=[remedy])


def _own_requirements() -> set[str]:
    """Modules of what headrace never goes without, as far as they are called like their packages."""
    try:
        lines = metadata.requires("headrace") or []
    except metadata.PackageNotFoundError:
        return set()
    names = (re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line)
    return {name[0].replace("-", "_") for name in names if name}
