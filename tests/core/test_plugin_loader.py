"""Plugins of third parties that raise, hang, exit, crash or lie: each becomes a problem; all else works."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core import plugin_loader
from headrace.core.conformance import Check
from headrace.core.platform import DeviceInfo, Status
from headrace.core.plugin_loader import Plugins, Problem, load_plugins
from third_party import BROKEN, Site

INFO = DeviceInfo(id="cpu", name="a processor", kind="cpu", total_bytes=1, free_bytes=1)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    installed = Site(tmp_path, monkeypatch)
    yield installed
    installed.forget()


def problems_of(plugins: Plugins, distribution: str) -> list[Problem]:
    return [problem for problem in plugins.problems if problem.plugin.distribution == distribution]


def only_problem(distribution: str) -> Problem:
    [problem] = problems_of(load_plugins(), distribution)
    return problem


def install_counting(site: Site, source: str = "", *, version: str = "1.0", record: bool = False) -> Path:
    """A plugin that adds a line to a file whenever it is imported, and then runs `source`."""
    log = site.folder.parent / "imports"
    count = f"with open({str(log)!r}, 'a') as f:\n    f.write('x\\n')\n"
    site.install("counted", "counted_plugin", count + source, version=version, record=record)
    return log


# ---- plugins that break -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("raises", Status.BROKEN, "RuntimeError: the vendor's library is too old (raises_plugin.py:3)"),
        ("exits", Status.CRASHED, "exit code 3; its last output: no license found"),
        ("segfaults", Status.CRASHED, "SIGSEGV"),
        ("calls_sys_exit", Status.BROKEN, "it called sys.exit(4)"),
    ],
)
def test_a_broken_plugin_is_a_problem(site: Site, name: str, status: Status, words: str) -> None:
    site.install("acme", f"{name}_plugin", (BROKEN / f"{name}.py").read_text())
    problem = only_problem("acme")
    assert problem.status == status
    assert words in problem.reason
    assert problem.plugin.version == "1.0"
    assert "pip uninstall acme" in problem.fix
    assert f"{name}_plugin" not in sys.modules


def test_a_hanging_plugin_is_a_problem(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PROBE_TIMEOUT_S", "0.5")
    site.install("acme", "hangs_plugin", (BROKEN / "hangs.py").read_text())
    problem = only_problem("acme")
    assert problem.status == Status.TIMEOUT
    assert "did not finish within 0.5 s" in problem.reason


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1", "it implements no hook"),
        ("@hookimpl\ndef headrace_platforms(colour): return []", "Argument(s) {'colour'}"),
        ("@hookimpl\ndef headrace_platform(): return []", "did you mean headrace_platforms?"),
        ("@hookimpl\ndef headrace_platforms(): return 7", "returned int 7, not a sequence of PlatformSpec"),
        ("@hookimpl\ndef headrace_platforms(): return ['cpu']", "a sequence with str 'cpu'"),
        ("@hookimpl\ndef headrace_platforms(): return [spec(name='My Chip')]", "PlatformSpec.name must be"),
        ("@hookimpl\ndef headrace_platforms(): return [spec(impl='Chip')]", "PlatformSpec.impl must be"),
        ("@hookimpl\ndef headrace_platforms(): return [spec(api='1.0')]", "PlatformSpec.api must be"),
        ("@hookimpl\ndef headrace_platforms(): return [spec(colour=1)]", "unexpected keyword argument 'colour'"),
        ("@hookimpl\ndef headrace_platforms(): 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_breaks_a_rule_is_told_which(site: Site, source: str, words: str) -> None:
    head = (
        "from headrace.core.hooks import hookimpl\nfrom headrace.core.platform import PlatformSpec\n"
        "def spec(**fields):\n"
        "    return PlatformSpec(**{'name': 'chip', 'impl': 'm:C', 'detect': 'm:f', **fields})\n"
    )
    site.install("acme", "rules_plugin", head + source)
    problem = only_problem("acme")
    assert problem.status == Status.BROKEN
    assert words in problem.reason


def test_an_entry_point_without_a_module(site: Site) -> None:
    site.install("acme", "real_plugin", "", target="no_such_module.inside")
    assert "names module 'no_such_module.inside', which does not exist" in only_problem("acme").reason


def test_a_plugin_that_misses_a_package_says_which(site: Site) -> None:
    site.install("acme", "needy_plugin", "import no_such_vendor_library")
    assert "No module named 'no_such_vendor_library'" in only_problem("acme").reason


# ---- verdicts are remembered ------------------------------------------------------------------------------
def test_a_verdict_is_used_again_until_the_version_changes(site: Site) -> None:
    log = install_counting(site, "raise RuntimeError('first')")
    assert "first" in only_problem("counted").reason
    assert "first" in only_problem("counted").reason
    assert log.read_text().count("x") == 1
    install_counting(site, "raise RuntimeError('other')", version="1.1")
    problem = only_problem("counted")
    assert "other" in problem.reason
    assert problem.plugin.version == "1.1"
    assert log.read_text().count("x") == 2


def test_an_edited_module_is_tried_again(site: Site) -> None:
    log = install_counting(site, "raise RuntimeError('before')")
    only_problem("counted")
    module = site.folder / "counted_plugin.py"
    module.write_text(module.read_text().replace("before", "after it was edited"))
    assert "after it was edited" in only_problem("counted").reason
    assert log.read_text().count("x") == 2


def test_an_installed_package_gives_another_chance(site: Site) -> None:
    log = install_counting(site, "import missing_until_now", record=True)
    only_problem("counted")
    (site.folder / "missing_until_now.py").write_text("")
    stamp = site.folder.stat().st_mtime_ns + 10**9
    os.utime(site.folder, ns=(stamp, stamp))
    assert "no hook" in only_problem("counted").reason
    assert log.read_text().count("x") == 2


def test_recheck_tries_again(site: Site) -> None:
    log = install_counting(site, "raise RuntimeError")
    load_plugins()
    load_plugins(recheck=True)
    assert log.read_text().count("x") == 2


def test_a_damaged_or_unwritable_cache_costs_a_check(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_counting(site, "raise RuntimeError")
    load_plugins()
    cache = Path(os.environ["HEADRACE_CACHE"]) / "plugins"
    [verdict] = cache.iterdir()
    verdict.write_text("{")
    load_plugins()
    assert log.read_text().count("x") == 2
    assert json.loads(verdict.read_text())["status"] == Status.BROKEN
    file = site.folder.parent / "a_file"
    file.write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(file))
    assert problems_of(load_plugins(), "counted")
    assert log.read_text().count("x") == 3


def test_a_good_plugin_is_tried_once_and_then_imported(site: Site) -> None:
    site.install_good("acme", "good_plugin", "acme-chip")
    plugins = load_plugins()
    assert not problems_of(plugins, "acme")
    [manifest] = [manifest for manifest in plugins.manifests if manifest.plugin.distribution == "acme"]
    assert manifest.spec.name == "acme-chip"
    assert "good_plugin" in sys.modules


# ---- names and versions -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["cpu", "null", "reference", "cuda", "tpu", "auto"])
def test_reserved_names_are_refused(site: Site, name: str) -> None:
    site.install_good("acme", "reserved_plugin", name)
    problem = only_problem("acme")
    assert problem.status == Status.CONFLICT
    assert problem.platform == name
    assert "reserved" in problem.reason


def test_the_later_of_two_equal_names_is_refused(site: Site) -> None:
    site.install_good("acme", "first_plugin", "chip")
    site.install_good("bolt", "second_plugin", "chip")
    plugins = load_plugins()
    [problem] = problems_of(plugins, "bolt")
    assert problem.status == Status.CONFLICT
    assert "taken by acme:first_plugin" in problem.reason
    assert [m.plugin.distribution for m in plugins.manifests if m.spec.name == "chip"] == ["acme"]


@pytest.mark.parametrize("api", ["(2, 0)", "(1, 99)", "(0, 9)"])
def test_another_interface_version_is_refused(site: Site, api: str) -> None:
    source = (
        "from headrace.core.hooks import hookimpl\nfrom headrace.core.platform import PlatformSpec\n@hookimpl\n"
        f"def headrace_platforms(): return [PlatformSpec(name='chip', impl='m:C', detect='m:f', api={api})]\n"
    )
    site.install("acme", "old_plugin", source)
    problem = only_problem("acme")
    assert problem.status == Status.INCOMPATIBLE
    assert "this headrace has 1.0" in problem.reason


def test_third_parties_can_be_left_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("acme", "raises_plugin", (BROKEN / "raises.py").read_text())
    monkeypatch.setenv("HEADRACE_NO_PLUGINS", "1")
    assert not problems_of(load_plugins(), "acme")
    monkeypatch.setenv("HEADRACE_NO_PLUGINS", "0")
    assert problems_of(load_plugins(), "acme")


def test_our_own_plugins_need_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setenv("HEADRACE_NO_PLUGINS", "1")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    plugins = load_plugins()
    assert not plugins.problems
    assert {"cpu", "reference", "null"} <= {manifest.spec.name for manifest in plugins.manifests}
    assert {plugin.distribution for plugin in plugins.loaded} == {plugin_loader.OWN}


# ---- hooks ------------------------------------------------------------------------------------------------
def test_hook_headrace_platforms(site: Site) -> None:
    site.install_good("acme", "good_plugin", "acme-chip")
    found = {plugin.distribution: specs for plugin, specs in load_plugins().ask("headrace_platforms")}
    assert [spec.name for spec in found["acme"]] == ["acme-chip"]


def test_hook_headrace_op_providers(site: Site) -> None:
    more = """
from headrace.core.platform import OpProvider

@hookimpl
def headrace_op_providers(platform):
    return [OpProvider(name="fast", ops={"add": max})] if platform == "cpu" else None
"""
    site.install_good("acme", "kernel_plugin", "acme-chip", more=more)
    plugins = load_plugins()
    names = {
        platform: {
            provider.name
            for _, providers in plugins.ask("headrace_op_providers", platform=platform, device=INFO)
            for provider in providers
        }
        for platform in ("cpu", "null")
    }
    assert names == {"cpu": {"fast", "torch-sdpa"}, "null": set()}


def test_hook_headrace_logits_processors() -> None:
    found: dict[str, Any] = {}
    for _, processors in load_plugins().ask("headrace_logits_processors"):
        found.update(processors)
    assert "no_repeat_ngram" in found


def test_hook_headrace_drafters() -> None:
    found: dict[str, Any] = {}
    for _, drafters in load_plugins().ask("headrace_drafters"):
        found.update(drafters)
    tokens = np.array([1, 2, 3, 1, 2], np.int32)
    assert found["ngram"]().propose(tokens, 2).tolist() == [3, 1]


def test_hook_headrace_conformance() -> None:
    lines: list[str] = []
    arguments = {"device": "null", "select": "memory.kv_plan", "report": lines.append}
    checks: list[Check] = load_plugins().hooks.headrace_conformance(**arguments)
    assert [(check.name, check.outcome) for check in checks] == [("memory.kv_plan", "passed")]
    assert len(lines) == 1


def test_a_hook_that_raises_spares_the_others(site: Site) -> None:
    bad = "\n@hookimpl\ndef headrace_logits_processors():\n    raise OSError('no such chip')\n"
    site.install_good("acme", "bad_hook_plugin", "acme-chip", more=bad)
    plugins = load_plugins()
    assert any("no_repeat_ngram" in answer for _, answer in plugins.ask("headrace_logits_processors"))
    [problem] = problems_of(plugins, "acme")
    assert "headrace_logits_processors failed: OSError: no such chip" in problem.reason


# ---- the commands go on -----------------------------------------------------------------------------------
RUN = "from headrace.core.cli import main; main()"
LLM = """
from headrace import LLM, SamplingParams
with LLM({folder!r}, device="null", load_format="dummy", skip_tokenizer_init=True) as llm:
    [output] = llm.generate({{"prompt_token_ids": [1, 2, 3]}}, SamplingParams(max_tokens=5, ignore_eos=True))
print(len(output.outputs[0].token_ids))
"""
CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_four_broken_plugins_break_no_command(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("raises", "hangs", "exits", "segfaults")
    for name in names:
        site.install(f"acme-{name}", f"{name}_plugin", (BROKEN / f"{name}.py").read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("HEADRACE_PROBE_TIMEOUT_S", "5")

    listing = python(RUN, "devices", "--json")
    assert listing.returncode == 0, listing.stderr
    result = json.loads(listing.stdout)
    reasons = {problem["distribution"]: (problem["status"], problem["reason"]) for problem in result["problems"]}
    assert reasons["acme-raises"][0] == Status.BROKEN
    assert reasons["acme-hangs"][0] == Status.TIMEOUT
    assert reasons["acme-exits"] == (
        Status.CRASHED,
        "loading it ended the process: exit code 3; its last output: no license found",
    )
    assert "SIGSEGV" in reasons["acme-segfaults"][1]
    assert {"cpu", "reference", "null"} <= {platform["name"] for platform in result["platforms"]}

    table = python(RUN, "devices")
    assert table.returncode == 0
    for name in names:
        assert f"{name}_plugin" in table.stdout
    for arguments in (
        ["--help"],
        ["version"],
        ["models"],
        ["doctor", "--device", "null"],
        ["conformance", "--device", "null", "--select", "runner.close"],
    ):
        run = python(RUN, *arguments)
        assert run.returncode == 0, (arguments, run.stderr)

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    run = python(LLM.format(folder=str(folder)))
    assert run.stdout.strip() == "5", run.stderr
