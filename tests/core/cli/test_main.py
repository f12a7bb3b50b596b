"""The command line as a program: speed of --help, exit codes, error form, Ctrl-C, closed pipes."""

import errno
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import psutil
import pytest

from headrace.core import errors
from headrace.core.cli import exits
from headrace.core.cli.commands import COMMANDS, LazyGroup

PROGRAM = "from headrace.core.cli import main; main()"
HEAVY = ("huggingface_hub", "jinja2", "numpy", "pluggy", "rich", "tokenizers", "torch", "transformers", "xxhash")


def _run(*arguments: str, code: str = PROGRAM, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**os.environ, **environ}
    )


# ---- --help and --version -----------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["complete", "--help"], ["plan", "--help"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = textwrap.dedent(f"""
        import sys
        from headrace.core.cli.exits import run
        assert run({arguments!r}) == 0
        loaded = {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})
        loaded |= {{name for name in sys.modules if name.startswith(("headrace.platforms", "headrace.plugins"))}}
        assert not loaded, loaded
    """)
    done = _run(code=code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(("Usage: headrace", "headrace "))


def test_help_takes_less_than_150_ms() -> None:
    """Of processor time, the best of five: the machine may be busy with something else."""

    def children_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(5):
        before = children_s()
        assert _run("--help").returncode == 0
        seconds.append(children_s() - before)
    assert min(seconds) < 0.15, seconds


def test_the_package_runs_as_a_module() -> None:
    import headrace

    run = subprocess.run([sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"headrace {headrace.__version__}\n"


def test_version_is_the_packages() -> None:
    import headrace

    assert _run("--version").stdout == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_it_is_looked_for(name: str) -> None:
    command = importlib.import_module(f"headrace.core.cli.{name.replace('-', '_')}").command
    assert isinstance(command, click.Command)
    assert command.help, name
    assert COMMANDS[name].endswith(".")


def test_an_unknown_command_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["modles"]) == 2
    assert capsys.readouterr().err == "error: no command 'modles'; did you mean models?\n  try: headrace --help\n"


def test_a_usage_error_points_to_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["version", "--jsn"]) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith("error: no such option")
    assert remedy == "  try: headrace version --help"


# ---- errors -------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def restore_handlers() -> Iterator[None]:
    """`run` takes over signals and the hook for unraisable exceptions; give them back."""
    numbers, hook = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), sys.unraisablehook
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    sys.unraisablehook = hook
    exits._Interrupt.code = 0


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("embed --seed 1 MODEL x", "no such option '--seed'; it means nothing to `headrace embed`"),
        ("transcribe --speculative=ngram MODEL x", "no such option '--speculative'; it means nothing to"),
        ("download --no-prefix-caching", "no such option '--no-prefix-caching'; it means nothing to"),
        ("complete --port 8 x", "no such option '--port'; it means nothing to `headrace complete`"),
        ("bench ops --chat-template F", "no such option '--chat-template'; it means nothing to `headrace bench ops`"),
        ("chat --url http://127.0.0.1:1 --device cpu", "--device is for a model that is loaded here, not for --url"),
        ("bench serve --url http://127.0.0.1:1 --kv-memory 1GiB", "--kv-memory is for a model that is loaded here"),
    ],
)
def test_options_that_mean_nothing_to_a_command(typed: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(typed.split()) == 2
    assert f"error: {reason}" in capsys.readouterr().err


def test_help_lists_what_means_something(capsys: pytest.CaptureFixture[str]) -> None:
    absent = {
        "embed": ("--seed", "--speculative", "--chat-template"),
        "download": ("--device", "--kv-memory", "--seed", "--dtype"),
        "transcribe": ("--speculative", "--chat-template", "--seed"),
        "plan": ("--seed", "--chat-template"),
        "run-batch": (),
    }
    for command, options in absent.items():
        assert exits.run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "--offline" in shown
        assert not [option for option in options if option in shown]


@pytest.mark.parametrize("program", ["from headrace.core.cli import main; main()", "from headrace import LLM; LLM()"])
def test_a_stack_that_is_too_small(program: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_STACK, (131072, resource.RLIM_INFINITY)); "
    done = subprocess.run([sys.executable, "-c", limit + program], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "a stack may have 128 KiB (ulimit -s), and 1024 are needed" in done.stderr


@pytest.fixture
def command_that_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    def run(body: Callable[[], object]) -> int:
        command = click.Command("version", callback=body)
        monkeypatch.setattr(LazyGroup, "get_command", lambda self, ctx, name: command)
        return exits.run(["version"])

    return run


def _raise(error: BaseException) -> None:
    raise error


def _documented_exit_codes() -> Iterator[tuple[str, int]]:
    """The tree at the head of core/errors.py, read as text: class -> exit code, inherited from its parent."""
    parents: list[tuple[int, int]] = []
    for match in re.finditer(r"^([| -]*)(\w+) .*$", errors.__doc__ or "", re.MULTILINE):
        depth = len(match[1])
        code = re.search(r"exit code (\d)", match[0])
        parents = [(d, c) for d, c in parents if d < depth]
        if depth and (code or parents):
            value = int(code[1]) if code else parents[-1][1]
            parents.append((depth, value))
            yield match[2], value


@pytest.mark.parametrize(("name", "code"), list(_documented_exit_codes()))
def test_exit_code_of_each_error(
    name: str,
    code: int,
    command_that_does: Callable[[Callable[[], object]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = getattr(errors, name)("it broke at 5 of 7", remedies=["a", "b", "c", "d"])
    assert command_that_does(lambda: _raise(error)) == code
    assert capsys.readouterr().err == "error: it broke at 5 of 7\n  try: a  |  b  |  c\n"


def test_the_error_tree_was_read() -> None:
    found = dict(_documented_exit_codes())
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = {kind.__name__ for kind in classes if issubclass(kind, errors.HeadraceError)}
    assert set(found) == ours - {"HeadraceError"}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ValueError("bad"), 1, "error: internal error: ValueError: bad (test_main.py:"),
        (AssertionError(), 1, "error: internal error: AssertionError:"),
        (MemoryError(), 4, "error: the host is out of memory"),
        (OSError(errno.ENOSPC, "No space", "/x/y"), 4, "error: no space left on the disk while writing /x/y"),
        (SystemExit(7), 7, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_other_exceptions(
    error: BaseException,
    code: int,
    reason: str,
    command_that_does: Callable[[Callable[[], object]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exits, "_silence_stdout", lambda: None)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    assert command_that_does(lambda: _raise(error)) == code
    shown = capsys.readouterr().err
    assert shown.startswith(reason)
    assert bool(shown) == bool(reason)
    assert "Traceback" not in shown


def test_debug_shows_the_traceback(
    command_that_does: Callable[[Callable[[], object]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    assert command_that_does(lambda: _raise(errors.ConfigError("wrong"))) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: wrong\n")


# ---- Ctrl-C and closed pipes --------------------------------------------------------------------------------
def _interrupted(code: str, *arguments: str, presses: int = 1) -> tuple[int, str, str]:
    """Run a program until it prints READY to stderr, press Ctrl-C, and give what it left."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "READY":
            break
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.3)
        except subprocess.TimeoutExpired:
            continue
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


READY = "import sys, time; sys.stderr.write('READY\\n'); sys.stderr.flush()"


def test_interrupt_while_importing(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        f"{READY}\ntry:\n    time.sleep(20)\nexcept KeyboardInterrupt:\n    raise ImportError('half imported')\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import headrace.core.cli.commands as commands
commands.LazyGroup.get_command = lambda self, ctx, name: __import__("slow_module")
{PROGRAM}
"""
    assert _interrupted(code, "complete", "x") == (130, "", "")


@pytest.mark.parametrize("moment", ["load", "generation"])
def test_interrupt_in(moment: str) -> None:
    """A stand-in model that takes forever to load, or to answer; what is on stdout stays."""
    code = f"""
import types
import headrace.core.cli.complete as complete
from headrace.core.sampling.params import SamplingParams
def wait():
    {READY}
    time.sleep(20)
class Model:
    default_sampling_params, has_chat_template = SamplingParams(), False
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return None
    def stream(self, prompt, params, lora):
        yield types.SimpleNamespace(outputs=[types.SimpleNamespace(text="so far")])
        wait()
def start(config):
    if {moment!r} == "load":
        wait()
    return Model()
complete.start_llm = start
{PROGRAM}
"""
    written = "so far\n" if moment == "generation" else ""
    assert _interrupted(code, "complete", "x") == (130, written, "")


def test_a_second_interrupt_ends_what_does_not_listen() -> None:
    code = f"""
import headrace.core.cli.complete as complete
def start(config):
    {READY}
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            time.sleep(20)
        except KeyboardInterrupt:
            pass
complete.start_llm = start
{PROGRAM}
"""
    assert _interrupted(code, "complete", "x", presses=2) == (130, "", "")


def test_threads_are_not_waited_for_after_an_interrupt() -> None:
    code = f"""
import threading
import headrace.core.cli.complete as complete
def start(config):
    {READY}
    threading.Thread(target=time.sleep, args=(20,)).start()
    time.sleep(20)
complete.start_llm = start
{PROGRAM}
"""
    assert _interrupted(code, "complete", "x") == (130, "", "")


def test_interrupt_of_a_real_run(tmp_path: Path, tiny_llama: Path) -> None:
    """The whole engine on the null platform, in the middle of its steps."""
    code = f"""
import threading, headrace.core.engine.engine as engine
step = engine.Engine.step
def first(self):
    engine.Engine.step = step
    {READY}
    return step(self)
engine.Engine.step = first
{PROGRAM}
"""
    options = ["--device", "null", "--load-format", "dummy", "--output-len", "3000", "--repeat", "50"]
    code_, out, err = _interrupted(code, "bench", "offline", str(tiny_llama), *options)
    assert (code_, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["version", "--json"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [["plan", "{model}"], ["devices"], ["doctor"]])
def test_a_reader_that_leaves_a_table(arguments: list[str], tiny_llama: Path) -> None:
    """The library that draws tables ends the program with 1."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [argument.format(model=tiny_llama) for argument in arguments]
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *command], stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("redirections", [">&-", "<&-", "2>&-", "<&- >&- 2>&-", "<&- >&-"])
def test_streams_that_are_closed_from_the_start(redirections: str, tiny_llama: Path) -> None:
    code = f"import os, sys; os.write(3, b'x'); {PROGRAM}"  # the only stream that is left
    for arguments, wanted in ((["plan", str(tiny_llama)], 0), (["complete", "-"], 2), (["bogus"], 2)):
        read_end, write_end = os.pipe()
        shell = f'exec 3>&{write_end} {write_end}>&-; "$@" {redirections}; exit $?'
        with os.fdopen(read_end, "rb") as report:
            done = subprocess.run(
                ["bash", "-c", shell, "bash", sys.executable, "-c", code, *arguments],
                pass_fds=[write_end],
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
            os.close(write_end)
            assert report.read() == b"x"
        assert done.returncode == wanted, done.stderr
        assert b"Traceback" not in done.stderr
        if wanted and "2>" not in redirections:
            assert done.stderr.startswith(b"error: "), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_no_process_behind(number: signal.Signals, tiny_llama: Path) -> None:
    """The server that a benchmark started ends with it."""
    options = ["--device", "null", "--load-format", "dummy", "--num-requests", "100000", "--concurrency", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "bench", "serve", str(tiny_llama), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup is heeded, and these tests may run under it
    )
    deadline_s = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children(recursive=True)) or len(children) < 2:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert b"Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def test_a_working_directory_that_is_gone(tmp_path: Path, tiny_llama: Path) -> None:
    gone = tmp_path / "gone"
    for model, code in (("../tiny-llama", 2), (str(tiny_llama), 0)):
        gone.mkdir()
        shell = f'cd {gone} && rmdir {gone} && "$@"'
        command = ["bash", "-c", shell, "bash", sys.executable, "-c", PROGRAM, "plan", model]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: the folder that this was started in is gone" if code else "")


def test_nohup_is_heeded() -> None:
    code = f"""
import os, signal
import headrace.core.cli.complete as complete
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def start(config):
    os.kill(os.getpid(), signal.SIGHUP)
    raise MemoryError
complete.start_llm = start
{PROGRAM}
"""
    assert subprocess.run([sys.executable, "-c", code, "complete", "x"], stderr=subprocess.PIPE).returncode == 4


def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, "version"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.decode().splitlines()[0]) == (4, "error: no space left on the disk")
    assert "try: output to another disk" in done.stderr.decode()


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    """Paths come back escaped as text, and as valid JSON."""
    gguf = tmp_path / "caf\u00e9-\u4f60.gguf"
    gguf.touch()
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    program = [sys.executable, "-c", PROGRAM, "download", str(gguf)]
    assert subprocess.check_output(program, env=environ) == f"{tmp_path}/caf\xe9-\\u4f60.gguf\n".encode("latin-1")
    assert json.loads(subprocess.check_output([*program, "--json"], env=environ))["path"] == str(gguf)
