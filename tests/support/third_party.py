"""Distributions of third parties, as installed files: what the plugin loader meets in the wild."""

import importlib
import os
import sys
from pathlib import Path

import pytest

GOOD = """
from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec

@hookimpl
def headrace_platforms():
    return [PlatformSpec(name={name!r}, impl="{module}:Chip", detect="{module}:detect", priority={priority})]
"""
BROKEN = Path(__file__).parents[1] / "plugins_broken"
"""One module for each way to break; each says in its docstring how."""


class Site:
    """A folder like site-packages, on the import path of this process and of its children."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "lib" / "extra-packages"
        self.folder.mkdir(parents=True)
        self.modules: list[str] = []
        monkeypatch.syspath_prepend(str(self.folder))
        monkeypatch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        monkeypatch.setenv("HEADRACE_PROBE_TIMEOUT_S", "60")
        monkeypatch.delenv("HEADRACE_NO_PLUGINS", raising=False)

    def install(
        self,
        distribution: str,
        module: str,
        source: str,
        *,
        version: str = "1.0",
        target: str = "",
        record: bool = False,
    ) -> None:
        """Install one module with one entry point of its name."""
        path = self.folder / f"{module}.py"
        path.write_text(source)
        stem = distribution.replace("-", "_")
        for old in self.folder.glob(f"{stem}-*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        info = self.folder / f"{stem}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[headrace.plugins]\n{module} = {target or module}\n")
        if record:
            (info / "RECORD").write_text(f"{module}.py,sha256=0,{len(source)}\n")
        # Two installations within one tick of the clock must still look like two.
        stamp = self.folder.stat().st_mtime_ns + 1_000_000 * (len(self.modules) + 1)
        os.utime(self.folder, ns=(stamp, stamp))
        self.modules.append(module)
        importlib.invalidate_caches()

    def install_good(self, distribution: str, module: str, name: str, *, priority: int = 20, more: str = "") -> None:
        """A plugin with one platform, and whatever else `more` defines."""
        self.install(distribution, module, GOOD.format(name=name, module=module, priority=priority) + more)

    def forget(self) -> None:
        """Take the modules out of this process again."""
        for module in self.modules:
            sys.modules.pop(module, None)
