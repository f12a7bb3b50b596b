"""The opened processor: native kernels if this build has them, else torch; threads, dtypes and memory."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from headrace.core.config import KV_DTYPES, EngineConfig
from headrace.core.errors import ConfigError, DeviceUnavailable, Unsupported
from headrace.core.extras import extra_remedy
from headrace.core.models.needs import FEATURES
from headrace.core.platform import Caps, Device, DeviceInfo, Gap, Memory, Need, Platform, Runner, RunnerConfig
from headrace.core.units import format_bytes
from headrace.core.weights.quantize import Quantizer, Scheme

from .detect import cpu_info, has_native_bfloat16, has_native_kernels, usable_threads
from .memory import host_memory, memory_limit

logger = logging.getLogger(__name__)
NATIVE = "native"
"""Our kernels, as the option op_providers calls them."""
STEP_TOKENS = 512
"""Products are as fast as with more (docs/performance.md), and streams beside a long prompt wait less."""
MAX_THREADS = 1024
"""As in kernels/cpu/thread_pool.h."""


class NativeDevice(Device):
    """The processor under our own kernels. A model that they cannot run goes to torch, if that is installed."""

    def __init__(self, *, info: DeviceInfo, dtypes: tuple[str, ...], threads: int) -> None:
        from headrace.kernels.cpu import _ops

        from .native.weights import SCHEMES

        self.info = info
        self.threads = threads
        try:
            self.isa = _ops.isa()
        except (ValueError, RuntimeError) as error:
            raise DeviceUnavailable(str(error), remedies=["unset HEADRACE_CPU_ISA"]) from error
        _ops.set_num_threads(threads)
        one = np.zeros((1, 1), np.float32)
        try:
            _ops.act(one, one.copy(), "silu")  # any kernel: the first one starts the threads
        except RuntimeError as error:
            raise DeviceUnavailable(
                f"{threads} threads cannot be started: {error}",
                remedies=["--threads 1", "a larger limit of processes (ulimit -u, or the container's pids)"],
            ) from error
        self.caps = Caps(
            array="opaque",
            dtypes=dtypes,
            kv_dtypes=KV_DTYPES,
            schemes=SCHEMES,
            packs_experts=True,
            shared_memory=True,
            capture="tape",
            step_tokens=STEP_TOKENS,
            # The encoder of images runs in torch.
            features=frozenset(FEATURES) - (set() if find_spec("torch") else {"images"}),
        )

    def check(self, needs: Sequence[Need]) -> list[Gap]:
        """As of any device. All that can be missing is what runs in torch."""
        return [replace(gap, remedy=extra_remedy("torch")) for gap in super().check(needs)]

    def runner(self, config: RunnerConfig) -> Runner:
        """A runner over a native program, or over torch where there can be none or the option op_providers wants it.
        Raises Unsupported if torch is missing then."""
        from headrace.core.ops.table import read_wishes

        from .native.runner import NativeRunner
        from .native.values import UntraceableOp

        wishes = config.engine.device.op_providers
        insisted, left_out = read_wishes(wishes, [NATIVE, *(provider.name for provider in self.extra_providers)])
        reason: UntraceableOp | str = f"op_providers={wishes}"
        if insisted <= {NATIVE} and NATIVE not in left_out:
            try:
                return NativeRunner(config)
            except UntraceableOp as error:
                reason = error
        cause = reason if isinstance(reason, UntraceableOp) else None
        if NATIVE in insisted and cause is not None:
            raise Unsupported(f"op provider {NATIVE} cannot serve this model: {cause}") from cause
        if find_spec("torch") is None:
            remedy = "pip install 'headrace[torch]'"
            raise Unsupported(f"this model has no native program: {reason}", remedies=[remedy]) from cause
        logger.warning("no native program, running in torch, which is slow reason=%r", str(reason))
        from .host import HostDevice

        host = HostDevice(info=self.info, dtypes=self.caps.dtypes, threads=self.threads)
        host.extra_providers = self.extra_providers
        kept = [*insisted - {NATIVE}, *(f"-{name}" for name in left_out - {NATIVE})]
        device = replace(config.engine.device, op_providers=",".join(kept))
        return host.runner(replace(config, engine=replace(config.engine, device=device)))

    def memory(self) -> Memory:
        """The machine's memory within the cgroup's limit."""
        return host_memory()

    def packed_bytes(self, shape: tuple[int, ...], format: str | Scheme) -> int:
        """Bytes of a packed weight, to the byte."""
        from .native.weights import packed_bytes

        return packed_bytes(shape, format)

    def quantizer(self) -> Quantizer:
        """The kernel."""
        from .native.weights import quantize_rows

        return quantize_rows

    def describe(self) -> Mapping[str, str]:
        """Instruction set, threads, and the limit on memory if there is one."""
        limit = memory_limit()
        return {
            "isa": self.isa,
            "threads": str(self.threads),
            **({"memory limit": format_bytes(limit)} if limit is not None else {}),
        }


class CpuPlatform(Platform):
    """Opens the one processor."""

    def open(self, ids: Sequence[str], config: EngineConfig) -> Device:
        """Open it; `--threads` sets the threads of this process. Raises DeviceUnavailable for any id."""
        check_no_ids("cpu", ids)
        narrow = ("bfloat16", "float32") if has_native_bfloat16() else ("float32", "bfloat16")
        dtypes, threads = (*narrow, "float16"), choose_threads(config)
        if has_native_kernels():
            return NativeDevice(info=cpu_info(), dtypes=dtypes, threads=threads)
        from .host import HostDevice

        return HostDevice(info=cpu_info(), dtypes=dtypes, threads=threads)


def check_no_ids(name: str, ids: Sequence[str]) -> None:
    """There is one processor, so a device of it takes no ids. Raises DeviceUnavailable."""
    if ids:
        raise DeviceUnavailable(
            f"device {name} takes no ids, got {','.join(ids)}", remedies=[f"--device {name}", "--threads 4"]
        )


def choose_threads(config: EngineConfig) -> int:
    """The threads that were asked for, or those that can run at full speed. Raises ConfigError for too many."""
    wanted = config.device.threads
    if wanted == "auto":
        return usable_threads()
    if wanted > MAX_THREADS:
        raise ConfigError(
            f"threads must be at most {MAX_THREADS}, got {wanted}", remedies=[f"--threads {usable_threads()}"]
        )
    if wanted > (processors := len(os.sched_getaffinity(0))):
        logger.warning("more threads than processors, which take turns threads=%d processors=%d", wanted, processors)
    return wanted
