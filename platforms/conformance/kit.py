"""Runs the checks on a device, one by one, whatever a check does."""

from collections.abc import Callable, Iterator

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.conformance import Check
from headrace.core.devices import open_device
from headrace.core.errors import HeadraceError, Unsupported
from headrace.core.plugin_loader import load_plugins

from .registry import CHECKS, CheckSpec, Failed, NotSupported, Subject


def all_checks() -> dict[str, CheckSpec]:
    """Every check by name."""
    from importlib import import_module

    for name in (
        "op",
        "attention",
        "model",
        "adapter",
        "rank",
        "stacked",
        "step",
        "size",
        "reuse",
        "view",
        "duty",
        "input",
    ):
        import_module(f".{name}_checks", __package__)
    return CHECKS


def run(device: str, select: str, report: Callable[[str], None]) -> list[Check]:
    """Run the checks whose names contain `select`. Raises DeviceUnavailable and PluginError."""
    chosen = [spec for name, spec in all_checks().items() if select in name]
    results: list[Check] = []
    for result in run_checks(device, chosen):
        results.append(result)
        report(f"{result.outcome:12} {result.name:34} {result.detail}")
    return results


def run_checks(device: str, chosen: list[CheckSpec]) -> Iterator[Check]:
    """Open the device, run checks on it, close it."""
    plugins = load_plugins()
    opened = open_device(EngineConfig(device=DeviceConfig(device=device)), plugins)
    subject = Subject(opened, plugins)
    try:
        for spec in chosen:
            yield run_check(spec, subject)
    finally:
        opened.close()


def run_check(spec: CheckSpec, subject: Subject) -> Check:
    """One check's result; an exception of any kind is one."""
    try:
        return Check(name=spec.name, outcome="passed", detail=spec.run(subject))
    except (NotSupported, Unsupported, NotImplementedError) as error:
        return Check(name=spec.name, outcome="unsupported", detail=str(error) or "not implemented")
    except Failed as error:
        return Check(name=spec.name, outcome="failed", detail=str(error))
    except HeadraceError as error:
        return Check(name=spec.name, outcome="failed", detail=error.reason)
    except Exception as error:  # noqa: BLE001 - a device that raises has failed the check
        return Check(name=spec.name, outcome="failed", detail=f"{type(error).__name__}: {error}")
    finally:
        subject.release()
