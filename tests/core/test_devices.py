"""Which platform is found and opened: detections that misbehave, the choice of auto, and explicit devices."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import find_platforms, open_device, parse_device
from headrace.core.errors import ConfigError, DeviceUnavailable, PluginError
from headrace.core.platform import Status
from headrace.core.plugin_loader import load_plugins
from third_party import Site

CHIP = """
import os, sys, time
from headrace.core.platform import Caps, Device, DeviceInfo, Memory, OpProvider, Platform, Probe, Status

INFO = DeviceInfo(id="chip:0", name="Acme Chip", kind="accelerator", total_bytes=100, free_bytes=50)

class ChipDevice(Device):
    def __init__(self, ids):
        self.info, self.caps, self.ids = INFO, Caps(), list(ids)
    def runner(self, config):
        raise NotImplementedError
    def memory(self):
        return Memory(total_bytes=100, free_bytes=50)

class Chip(Platform):
    def open(self, ids, config):
        return ChipDevice(ids)

def detect():
    {detect}
    return Probe(status=Status.OK, devices=(INFO,))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    installed = Site(tmp_path, monkeypatch)
    yield installed
    installed.forget()


def install_chip(site: Site, *, detect: str = "pass", more: str = "", priority: int = 90) -> None:
    site.install_good("acme", "chip_plugin", "chip", priority=priority, more=CHIP.format(detect=detect) + more)


def config_for(device: str) -> EngineConfig:
    return EngineConfig(device=DeviceConfig(device=device, threads=1))


def status_of(name: str, timeout_s: float = 60) -> tuple[Status, str]:
    [found] = [item for item in find_platforms(load_plugins(), timeout_s=timeout_s) if item.spec.name == name]
    return found.probe.status, found.probe.reason


# ---- detection --------------------------------------------------------------------------------------------
def test_a_detected_device_comes_through_the_child(site: Site) -> None:
    install_chip(site, detect="print('{garbage'); sys.stderr.write('more')")
    [found] = [item for item in find_platforms(load_plugins()) if item.spec.name == "chip"]
    assert found.is_usable
    [info] = found.probe.devices
    assert (info.id, info.name, info.kind, info.total_bytes, info.free_bytes) == (
        "chip:0", "Acme Chip", "accelerator", 100, 50,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("detect", "status", "words"),
    [
        ("raise ValueError('driver 3 is too old\\nsecond line')", Status.BROKEN, "ValueError: driver 3 is too old"),
        ("sys.exit('bye')", Status.BROKEN, "sys.exit('bye')"),
        ("return 5", Status.BROKEN, "returned int, not a Probe"),
        ("return Probe(status=Status.OK, devices=(object(),))", Status.BROKEN, "not JSON serializable"),
        ("return Probe(status='splendid')", Status.BROKEN, "malformed Probe: 'splendid'"),
        ("os.kill(os.getpid(), 11)", Status.CRASHED, "SIGSEGV"),
        ("os.close(0); os.closerange(1, 99); os._exit(0)", Status.CRASHED, "exit code 0"),
        ("return Probe(status=Status.NO_DEVICE, reason='nothing there')", Status.NO_DEVICE, "nothing there"),
    ],
)
def test_a_detection_that_misbehaves_is_a_reason(site: Site, detect: str, status: Status, words: str) -> None:
    install_chip(site, detect=detect)
    found, reason = status_of("chip")
    assert found == status
    assert words in reason
    with pytest.raises(DeviceUnavailable, match="device chip cannot be used") as caught:
        open_device(config_for("chip"))
    assert words in caught.value.reason
    assert "headrace devices" in caught.value.remedies


@pytest.mark.parametrize(
    "detect",
    [
        "time.sleep(1000)",
        # A child of the child that keeps the output open must not keep us waiting either.
        "import subprocess; subprocess.Popen(['sleep', '1000']); time.sleep(1000)",
    ],
)
def test_a_detection_that_hangs_is_ended(site: Site, detect: str) -> None:
    install_chip(site, detect=detect)
    assert status_of("chip", timeout_s=1.5) == (
        Status.TIMEOUT,
        "its detection chip_plugin:detect did not finish within 1.5 s",
    )


def test_detections_run_side_by_side(site: Site) -> None:
    for number in range(3):
        module = f"chip{number}_plugin"
        site.install_good(f"acme{number}", module, f"chip{number}", more=CHIP.format(detect="time.sleep(1000)"))
    found = [item for item in find_platforms(load_plugins(), timeout_s=2) if item.spec.name.startswith("chip")]
    assert [item.probe.status for item in found] == [Status.TIMEOUT] * 3


def test_missing_device_files_need_no_child(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from headrace.core.hooks import hookimpl\nfrom headrace.core.platform import PlatformSpec\n@hookimpl\n"
        "def headrace_platforms():\n"
        "    nodes = ('/dev/no-chip*',)\n"
        "    return [PlatformSpec(name='chip', impl='m:C', detect='m:f', device_nodes=nodes, fix='buy one')]"
    )
    site.install("acme", "nodes_plugin", source)
    plugins = load_plugins()
    monkeypatch.setattr(subprocess, "Popen", _no_child)
    [found] = [item for item in find_platforms(plugins) if item.spec.name == "chip"]
    assert found.probe.status == Status.NO_DEVICE
    assert found.probe.reason == "no device file /dev/no-chip*"
    assert found.probe.fix == "buy one"


# ---- the choice -------------------------------------------------------------------------------------------
def test_auto_takes_the_usable_platform_of_highest_priority(site: Site) -> None:
    install_chip(site, priority=90)
    assert open_device(config_for("auto")).info.id == "chip:0"


@pytest.mark.parametrize("priority", [-5, 1])
def test_auto_leaves_lower_and_negative_priorities(site: Site, priority: int) -> None:
    install_chip(site, priority=priority)
    with closing(open_device(config_for("auto"))) as device:
        assert device.info.id == "cpu"


def test_auto_passes_over_what_cannot_be_used(site: Site) -> None:
    install_chip(site, detect="raise OSError", priority=90)
    with closing(open_device(config_for("auto"))) as device:
        assert device.info.id == "cpu"


def test_auto_with_nothing_usable_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NO_PLUGINS", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("headrace.platforms.cpu.detect.find_spec", lambda name: None)
    reason = "cpu: the native kernels were not built, and the package torch is not installed"
    with pytest.raises(DeviceUnavailable, match=reason) as caught:
        open_device(config_for("auto"))
    assert "headrace devices" in caught.value.remedies


def test_opening_the_default_device_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NO_PLUGINS", "1")
    monkeypatch.setattr(subprocess, "Popen", _no_child)
    with closing(open_device(config_for("auto"))) as device:
        assert device.info.id == "cpu"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpuu", "did you mean cpu"),
        ("cpu:3", "device cpu takes no ids, got 3"),
        ("null:7", "depth as id, 0, 1, 2; got 7"),
    ],
)
def test_a_device_that_is_not_there_says_what_is(device: str, words: str) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        open_device(config_for(device))
    assert words in caught.value.reason
    assert caught.value.remedies
    assert caught.value.exit_code == 5


def test_a_refused_plugin_is_named_by_its_platform(site: Site) -> None:
    site.install("acme", "chip", "raise ImportError('libchip.so.4: cannot open shared object file')")
    with pytest.raises(DeviceUnavailable, match="libchip.so.4"):
        open_device(config_for("chip"))


def test_ids_reach_the_platform(site: Site) -> None:
    install_chip(site)
    device: Any = open_device(config_for("chip:0,1"))
    assert device.ids == ["0", "1"]


def test_an_emulated_device_needs_no_device(site: Site) -> None:
    install_chip(site, detect="return Probe(status=Status.NO_DEVICE, reason='none')")
    device: Any = open_device(config_for("chip:emulated"))
    assert device.ids == ["emulated"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "\nclass Chip(Platform):\n    def open(self, ids, config): raise RuntimeError('no firmware')",
            "no firmware",
        ),
        ("\nclass Chip(Platform):\n    def open(self, ids, config): return 3", "returned int, not a Device"),
        ("\nclass Chip: pass", "is no headrace Platform"),
        ("\ndel Chip", "has no attribute 'Chip'"),
    ],
)
def test_a_platform_that_cannot_be_opened_names_its_plugin(site: Site, more: str, words: str) -> None:
    install_chip(site, more=more)
    with pytest.raises(PluginError) as caught:
        open_device(config_for("chip"))
    assert words in caught.value.reason
    assert caught.value.plugin == "acme:chip_plugin"


def test_other_plugins_bring_op_providers(site: Site) -> None:
    more = (
        "\n@hookimpl\ndef headrace_op_providers(platform, device):\n"
        "    return [OpProvider(name='fast', ops={'add': max})] if platform == 'chip' else None"
    )
    install_chip(site, more=more)
    device = open_device(config_for("chip"))
    assert [provider.name for provider in device.extra_providers] == ["fast"]


def test_a_provider_of_the_wrong_type_is_a_problem(site: Site) -> None:
    install_chip(site, more="\n@hookimpl\ndef headrace_op_providers(): return ['fast']")
    plugins = load_plugins()
    assert open_device(config_for("chip"), plugins).extra_providers == ()
    assert any("not a sequence of OpProvider" in problem.reason for problem in plugins.problems)


# ---- the spelling of --device -----------------------------------------------------------------------------
NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True).filter(lambda name: name != "auto")
IDS = st.lists(st.from_regex(r"[a-z0-9]{1,4}", fullmatch=True), unique=True, max_size=4)


@given(NAMES, IDS)
def test_a_device_is_a_name_and_ids(name: str, ids: Sequence[str]) -> None:
    assert parse_device(f"{name}:{','.join(ids)}" if ids else name) == (name, list(ids))


@pytest.mark.parametrize("text", ["", ":", "chip:", "chip:0,", "chip:,0", "auto:0", ":0"])
def test_a_malformed_device_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto"):
        parse_device(text)


def test_an_id_may_stand_once() -> None:
    with pytest.raises(ConfigError, match="names an id twice"):
        parse_device("chip:1,1")


# ---- the commands -----------------------------------------------------------------------------------------
def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from headrace.core.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_doctor_uses_the_device(device: str) -> None:
    result = run("doctor", "--device", device, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert outcomes["generate"] == outcomes["load"] == "passed"
    assert outcomes["matmul"] == ("passed" if device == "cpu" else "unsupported")
    assert bool(report["ops"]) == (device == "cpu")


def test_commands_exit_with_5_for_a_device_that_is_not_there() -> None:
    for command in (["doctor"], ["conformance"]):
        result = run(*command, "--device", "gaudy")
        assert result.returncode == 5
        assert "no plugin brings a platform 'gaudy'; did you mean gaudi" in result.stderr
        assert "try: headrace devices" in result.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="the definitions need torch")
def test_conformance_exits_with_7_if_a_check_failed() -> None:
    # The null platform computes no model, so its tokens cannot be the reference's.
    result = run("conformance", "--device", "null", "--select", "model.greedy.plain", "--json")
    assert result.returncode == 7
    assert json.loads(result.stdout)["counts"] == {"failed": 1}


def test_conformance_needs_a_check_of_that_name() -> None:
    result = run("conformance", "--device", "null", "--select", "no such check")
    assert result.returncode == 2
    assert "no check's name contains 'no such check'" in result.stderr


def _no_child(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a child process was started")
