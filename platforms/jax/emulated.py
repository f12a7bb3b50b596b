"""JAX's own processor backend in the place of an accelerator: its real code path without the accelerator."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from headrace.core.models.spec import ModelSpec
from headrace.core.platform import DeviceInfo, Memory
from headrace.core.runner.jax import JaxDevice

from ..cpu.detect import cpu_info
from ..cpu.memory import host_memory

_QUICK_COMPILES = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""An emulation is for trying things out: compiling takes a fifth of the time, and products are as fast as ever."""

MOST_LAYERS = 8
"""Steps of models that have more run op by op."""


class EmulatedJax(JaxDevice):
    """Mix in before a JaxDevice: JAX does not count memory on a processor, the machine does."""

    def compiles_steps(self, spec: ModelSpec) -> bool:
        """Only a small model's: a program of 30 layers takes ten seconds and more, and there are dozens."""
        return spec.num_layers <= MOST_LAYERS

    def compiler_options(self) -> Mapping[str, Any]:
        """Those options that this version of XLA has."""
        return {name: value for name, value in _QUICK_COMPILES.items() if _has_option(name, value)}

    def memory(self) -> Memory:
        """The machine's memory within the cgroup's limit."""
        return host_memory()


def emulated_info(name: str) -> DeviceInfo:
    """The processor as device `name`:emulated."""
    return dataclasses.replace(cpu_info(id=f"{name}:emulated"), name=f"this processor in the place of {name}")


def _has_option(name: str, value: Any) -> bool:
    program = jax.jit(lambda x: x + 1).lower(0)
    try:
        program.compile({name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
