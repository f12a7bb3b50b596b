"""The rules of the house that a tool can check."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("core", "kernels", "platforms", "plugins")
DEVICE_WORDS = re.compile(
    r"\b(cuda|rocm|hip|xpu|hpu|gaudi|tpu|neuron|nvidia|amd|intel|mps|is_cuda)\b|torch\.(cuda|xpu|hpu|mps)",
    re.IGNORECASE,
)


def sources(*tops: str) -> list[Path]:
    """Python files under the given top folders."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def test_core_has_no_device_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources("core")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DEVICE_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["if x.is_cuda():", "torch.cuda.synchronize()", "# for TPU only", "a ROCm device"])
def test_device_words_are_found(line: str) -> None:
    assert DEVICE_WORDS.search(line)


def test_no_file_is_over_600_lines() -> None:
    files = [*sources(*TOPS, "src"), *(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {str(path): n for path, n in lengths.items() if n > 600}


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "gaudi", "tpu", "neuron"])
def test_a_platform_is_under_1200_lines(name: str) -> None:
    """With what it shares with others, without kernels: the folders that its modules import, each counted in full."""
    folders, seen = {name}, set[str]()
    while folders - seen:
        seen.add(folder := (folders - seen).pop())
        text = "".join(path.read_text(encoding="utf-8") for path in sources(f"platforms/{folder}"))
        folders |= set(re.findall(r"^\s*from \.\.(\w+)\.", text, re.MULTILINE)) - {"cpu"}
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines()) for top in seen for path in sources(f"platforms/{top}")
    )
    assert 0 < lines < 1200, seen


def test_every_module_says_why_it_exists() -> None:
    silent = [str(path.relative_to(ROOT)) for path in sources(*TOPS, "src") if not _docstring(path)]
    assert not silent


def test_top_folders_are_imported_by_their_full_name() -> None:
    found = []
    for path in [*sources(*TOPS, "src"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] in TOPS]
    assert not found


def test_imports_across_top_folders_are_absolute() -> None:
    found = []
    for path in sources(*TOPS):
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_hooks_are_documented_and_tested() -> None:
    tree = ast.parse((ROOT / "core" / "hooks.py").read_text(encoding="utf-8"))
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert hooks
    document = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    users = "\n".join(path.read_text(encoding="utf-8") for path in sources("platforms", "plugins"))
    for hook in hooks:
        assert ast.get_docstring(hook), hook.name
        assert re.search(rf"^#+ .*{hook.name}", document, re.MULTILINE), f"docs/hooks.md has no heading {hook.name}"
        assert f"def test_hook_{hook.name}" in tests, f"no test_hook_{hook.name}"
        assert f"def {hook.name}(" in users, f"nothing in the tree implements {hook.name}"


def test_broad_excepts_do_something() -> None:
    found = []
    for path in sources(*TOPS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
                broad = node.type is None or (isinstance(node.type, ast.Name) and "Exception" in node.type.id)
                if broad:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_sources_are_ascii() -> None:
    found = [str(path.relative_to(ROOT)) for path in sources(*TOPS, "src") if not path.read_bytes().isascii()]
    assert not found


def _loaded_modules(code: str) -> set[str]:
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(run.stdout.splitlines()[-1]))


HEAVY = {"torch", "jax", "transformers", "numpy", "tokenizers", "rich", "huggingface_hub", "jinja2", "triton"}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import headrace", {"headrace"}),
        (
            "import sys; sys.argv = ['headrace', '--help']\nfrom headrace.core.cli import main\n"
            "try:\n    main()\nexcept SystemExit:\n    pass",
            {"headrace", "click"},
        ),
    ],
)
def test_imports_stay_cheap(code: str, allowed: set[str]) -> None:
    loaded = _loaded_modules(code) - _loaded_modules("pass")
    third_party = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert third_party <= allowed, third_party - allowed
    assert not HEAVY & loaded


def _docstring(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
