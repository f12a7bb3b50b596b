"""examples/third_party_backend, installed beside headrace by docs/add-a-platform.md; every command there runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
PAGE = (ROOT / "docs" / "add-a-platform.md").read_text(encoding="utf-8")
SOURCES = [*sorted(EXAMPLE.rglob("*.py")), EXAMPLE / "pyproject.toml"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own that sees the packages of this one."""

    folder: Path

    def run(self, command: str, *, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
        """Run a command of the page. pip is that of this environment, told to install into the other."""
        program, *arguments = shlex.split(command)
        python = str(self.folder / "bin" / "python")
        match program:
            case "headrace":
                start = [python, "-c", "from headrace.core.cli import main; main()"]
            case "pip":
                start = [sys.executable, "-m", "pip", "--python", python]
            case _:
                start = [python, "-m", program]
        paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [*start, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths, "HEADRACE_CACHE": str(self.folder / "cache")},
        )


def commands(page: str) -> list[str]:
    """The indented lines of a page."""
    return re.findall(r"^    ((?:pip|headrace|pytest) .+)$", page, re.MULTILINE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    [site] = folder.glob("lib/python3*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    # A copy, because building leaves files behind.
    shutil.copytree(EXAMPLE, folder / "examples" / "third_party_backend")
    found = Environment(folder)
    install, *_ = commands(PAGE)
    result = found.run(f"{install} --quiet --no-index")
    assert result.returncode == 0, result.stdout + result.stderr
    return found


def test_it_is_small() -> None:
    lines = {str(path.relative_to(EXAMPLE)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert sum(lines.values()) < 150, lines


def test_the_page_shows_the_example() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    assert [block for block in blocks if block not in sources] == []


def test_core_knows_nothing_of_it() -> None:
    found = [path for top in ("core", "platforms", "kernels") for path in (ROOT / top).rglob("*.py")]
    assert [path for path in found if "abacus" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("headrace devices", "abacus:0   ok         Abacus One"),
        ("headrace doctor --device abacus --ops", "rms_norm"),
        ("headrace conformance --device abacus --select model.greedy.plain", "0 failed"),
        pytest.param("pytest ", "1 passed", marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_the_page_run(command: str, words: str, environment: Environment) -> None:
    [line] = [line for line in commands(PAGE) if line.startswith(command)]
    result = environment.run(line)
    assert result.returncode == 0, result.stdout + result.stderr
    assert words in result.stdout


@pytest.mark.slow
def test_it_passes_the_kit(environment: Environment) -> None:
    result = environment.run("headrace conformance --device abacus", timeout_s=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "abacus: " in result.stdout and " 0 failed" in result.stdout
