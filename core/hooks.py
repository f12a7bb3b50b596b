"""The hooks that plugins may implement: the whole interface between headrace and what extends it.

A plugin is a module named by the entry-point group `headrace.plugins`; it marks functions with `hookimpl`.
A hook implementation may accept fewer arguments than its specification. docs/hooks.md shows one of each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from .platform import DeviceInfo, OpProvider, PlatformSpec
from .structured.compiler import GrammarCompiler, Vocabulary

if TYPE_CHECKING:
    from .runner.drafts import Drafter

GROUP = "headrace.plugins"
hookspec = pluggy.HookspecMarker("headrace")
hookimpl = pluggy.HookimplMarker("headrace")


@hookspec
def headrace_platforms() -> Sequence[PlatformSpec]:
    """Manifests of platforms. Called when devices are listed or chosen. May import nothing but the standard
    library and headrace.core.platform. None means no platform."""
    raise NotImplementedError


@hookspec
def headrace_op_providers(platform: str, device: DeviceInfo) -> Sequence[OpProvider]:
    """Kernels for a platform that someone else ships. Called after the platform opened the device.
    None means nothing for this device."""
    raise NotImplementedError


@hookspec
def headrace_logits_processors() -> Mapping[str, Callable[..., Any]]:
    """Logits processors by name. Called when a request names one. Each value is a factory
    (sampling_params, prompt_token_ids) -> f(output_token_ids, logits [vocab_size] float32) -> logits.
    None means no processor."""
    raise NotImplementedError


@hookspec
def headrace_drafters() -> Mapping[str, "Callable[[], Drafter]"]:
    """Drafters by name, for `--speculative NAME`. Called when an engine that is to have one starts, which calls the
    factory of its name once. None means no drafter."""
    raise NotImplementedError


@hookspec
def headrace_structured_output(vocabulary: Vocabulary) -> GrammarCompiler:
    """What compiles the grammars of structured output. Called when an engine starts, so what takes long is left to
    the first grammar. Of several the last is taken, and headrace's own comes first. None means no compiler."""
    raise NotImplementedError


@hookspec(firstresult=True)
def headrace_conformance(device: str, select: str, report: Callable[[str], None]) -> Sequence[Any]:
    """Run the conformance kit on a device. Called by `headrace conformance`. `select` is a part of check
    names ("" for all); `report` takes progress lines. Returns core.conformance.Check results; None means that
    this plugin brings no kit."""
    raise NotImplementedError
