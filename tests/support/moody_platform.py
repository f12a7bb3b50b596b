"""A third party's platform for tests of faults: null, but some prompts kill the process, make a step fail or slow."""

import os
from pathlib import Path

PLUGIN = """
import os
import time

import numpy as np

from headrace.core.hooks import hookimpl
from headrace.core.platform import PlatformSpec
from headrace.platforms.null.device import NullDevice, NullPlatform, detect
from headrace.platforms.null.runner import NullRunner


@hookimpl
def headrace_platforms():
    return [PlatformSpec(name="moody", impl="moody:MoodyPlatform", detect="moody:detect", priority=-3)]


class MoodyPlatform(NullPlatform):
    def open(self, ids, config):
        return MoodyDevice(depth=0)


class MoodyDevice(NullDevice):
    def runner(self, config):
        return MoodyRunner(config, self)


class MoodyRunner(NullRunner):
    def step(self, batch):
        ids = np.asarray(batch.forward.input_ids)
        three = (ids[2:] == ids[1:-1]) & (ids[1:-1] == ids[:-2])
        if (three & (ids[2:] == 13)).any():
            os._exit(1)
        if (three & (ids[2:] == 14)).any():
            time.sleep(3)
        if (three & (ids[2:] == 15)).any():
            raise ZeroDivisionError("a step that fails")
        time.sleep(STEP_S)
        return super().step(batch)
"""

DEADLY = [13, 13, 13, 7]
SLOW = [14, 14, 14, 7]
FAILING = [15, 15, 15, 7]


def install(folder: Path, *, step_s: float = 0.0) -> dict[str, str]:
    """Install the platform `moody`; the environment that a server needs to find it. A step takes step_s more."""
    folder.mkdir(parents=True)
    (folder / "moody.py").write_text(f"STEP_S = {step_s}\n{PLUGIN}")
    info = folder / "moody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.plugins]\nmoody = moody\n")
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH", "")) if part)
    return {"PYTHONPATH": path, "HEADRACE_CACHE": str(folder / "cache"), "HEADRACE_NO_PLUGINS": ""}
