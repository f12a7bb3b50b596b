"""For which GPUs the installed torch was built, read from its files: importing torch takes seconds."""

import ast
import os
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.core.platform import Probe, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Versions of torch and of what it was built for; "" for what it was not."""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""


def installed_torch(root: Path | None = None) -> TorchBuild | None:
    """The installed torch, or None. root: its folder, for tests."""
    if root is None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0])
    try:
        tree = ast.parse((root / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return TorchBuild(version="of unknown version")
    found: dict[str, str] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[target.id] = value.value
    return TorchBuild(
        version=found.get("__version__", "of unknown version"),
        cuda=found.get("cuda", ""),
        hip=found.get("hip", ""),
        xpu=found.get("xpu", ""),
    )


def software_gap(build: TorchBuild | None, built_for: str, *, fix: str) -> Probe | None:
    """Why the installed software cannot drive the GPU, or None if it can. built_for: a field of TorchBuild."""
    if build is None:
        return Probe(status=Status.MISSING, reason="the package torch is not installed", fix=fix)
    if not getattr(build, built_for):
        reason = f"the installed torch {build.version} is not built for it ({built_for})"
        return Probe(status=Status.MISSING, reason=reason, fix=fix)
    if find_spec("triton") is None:
        return Probe(status=Status.MISSING, reason="the package triton is not installed", fix=fix)
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        reason = (
            "Triton compiles how it launches kernels, and there is no C compiler (gcc or clang, or what CC names)"
        )
        return Probe(status=Status.MISSING, reason=reason, fix="apt install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        reason = f"Triton compiles how it launches kernels, and Python's headers are not there ({header})"
        return Probe(status=Status.MISSING, reason=reason, fix="apt install python3-dev")
    return None
