"""The examples in docs/hooks.md are plugins that load, and do what the page says."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import RequestError
from headrace.core.platform import DeviceInfo, OpContext
from headrace.core.plugin_check import new_manager, read_manifests, register
from headrace.core.sampling.params import SamplingParams
from headrace.core.self_test import tiny_spec
from headrace.core.structured.compiler import Vocabulary
from headrace.core.structured.params import StructuredOutputParams
from headrace.core.text.tokenizer import Tokenizer
from tiny_tokenizers import train_byte_level

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (headrace_\w+)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
AVX512 = DeviceInfo(id="cpu", name="a processor", kind="cpu", total_bytes=1, free_bytes=1, arch="avx512")


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's own packages, which the examples import."""
    packages: dict[str, dict[str, Any]] = {
        "acme_kernels": {"rms_norm": max},
        "acme_headrace": {},
        "acme_headrace.checks": {"run_all": lambda select, report: [("acme.speed", True)]},
    }
    for name, attributes in packages.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def call(hook: str, **arguments: Any) -> Any:
    """Register the example of a hook as a plugin, and call the hook."""
    plugin = types.ModuleType(f"example_{hook}")
    exec(compile(EXAMPLES[hook], hook, "exec"), vars(plugin))
    manager = new_manager()
    register(manager, plugin, hook)
    return getattr(manager.hook, hook)(**arguments)


def test_platforms() -> None:
    [answer] = call("headrace_platforms")
    [spec] = read_manifests(answer)
    assert (spec.name, spec.api, spec.priority) == ("acme", (1, 0), 60)


def test_op_providers() -> None:
    [[provider]] = call("headrace_op_providers", platform="cpu", device=AVX512)
    context = OpContext(spec=tiny_spec(), dtype="bfloat16", block_size=16)
    assert provider.declines("rms_norm", context) == "written for float32, not bfloat16"
    assert call("headrace_op_providers", platform="acme", device=AVX512) == []


def test_logits_processors() -> None:
    [processors] = call("headrace_logits_processors")
    process = processors["only_even"](SamplingParams(extra_args={"from": 1}), [1, 2])
    assert process([], np.zeros(4, np.float32)).tolist() == [0, 0, 0, 0]
    assert process([0], np.zeros(4, np.float32)).tolist() == [0, -np.inf, 0, -np.inf]


def test_drafters() -> None:
    [drafters] = call("headrace_drafters")
    assert drafters["again"]().propose(np.array([4, 5], np.int32), 3).tolist() == [5]


def test_structured_output() -> None:
    trained = train_byte_level()
    vocabulary = Vocabulary(tokenizer=Tokenizer(trained), vocab_size=512, end_token_ids=[2])
    [compiler] = call("headrace_structured_output", vocabulary=vocabulary)
    matcher = compiler.compile(StructuredOutputParams(kind="regex", value="[0-9]*")).new_matcher()
    row = np.zeros(16, np.int32)
    matcher.fill_mask(row)
    allowed = {t for t in range(512) if row[t // 32] >> (t % 32) & 1}
    assert allowed == {2, *(id for text, id in trained.get_vocab().items() if text.isascii() and text.isdigit())}
    with pytest.raises(RequestError, match="acme knows no json_object"):
        compiler.compile(StructuredOutputParams(kind="json_object"))


def test_conformance() -> None:
    [check] = call("headrace_conformance", device="acme:0", select="", report=print)
    assert (check.name, check.outcome) == ("acme.speed", "passed")
    assert call("headrace_conformance", device="cpu", select="", report=print) is None
