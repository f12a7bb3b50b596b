"""How a command ends: exit codes, error messages, Ctrl-C and closed pipes, in one place.

0 ok, 1 internal, 2 usage, 3 model not found or denied, 4 does not fit, 5 device or plugin unavailable,
6 port busy, 7 self-test failed, 130 interrupted, 143 and 129 ended by SIGTERM and SIGHUP.
"""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..errors import HeadraceError
from ..extras import missing_package
from ..stack_limit import check_stack

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

OK = 0
INTERNAL = 1
USAGE = 2
DOES_NOT_FIT = 4
PORT_BUSY = 6
SELF_TEST_FAILED = 7
SIGNALLED = 128
"""Plus a signal's number."""
INTERRUPTED = SIGNALLED + signal.SIGINT


class _Interrupt:
    """The exit code of the signal that came, 0: none. A second one ends the process at once."""

    code = 0


def run(arguments: Sequence[str]) -> int:
    """Run one command line in this process and return its exit code; errors have been printed."""
    _open_standard_streams()
    signal.signal(signal.SIGINT, _on_interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we then
            signal.signal(number, _on_interrupt)
    sys.unraisablehook = _on_unraisable
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = os.environ.get("HEADRACE_DEBUG", "") not in ("", "0") or "--debug" in arguments
    try:
        check_stack()
        from .commands import command

        context = command.make_context("headrace", list(arguments))
        with context:
            command.invoke(context)
        sys.stdout.flush()
        return OK
    except BaseException as error:  # noqa: BLE001 - the border of the program: every error gets its exit code
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
        return _exit_code(error, arguments)


def leave(code: int) -> NoReturn:
    """End the process. After a signal nothing is waited for: downloads and kernels may still run in threads."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _silence_stdout()
    if code > SIGNALLED:
        os._exit(code)
    sys.exit(code)


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """In the block Ctrl-C raises nothing: the function that the block gets says whether it was pressed.

    For work that must not be broken off at any instruction, such as an engine's step. A second press ends the
    process at once.
    """
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            os._exit(INTERRUPTED)
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def print_error(reason: str, remedies: Sequence[str] = ()) -> None:
    """`error: ...` and the line of things to try, on stderr."""
    text = f"error: {reason}\n"
    if remedies:
        text += f"  try: {'  |  '.join(remedies[:3])}\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # nobody reads it
        return


def _exit_code(error: BaseException, arguments: Sequence[str]) -> int:
    """Print what there is to say of an exception, and give the exit code it stands for."""
    import click

    # An import that Ctrl-C broke off may surface as any other exception.
    if _Interrupt.code or isinstance(error, KeyboardInterrupt | click.Abort):
        return _Interrupt.code or INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # rich makes the one of the other
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else OK if error.code is None else INTERNAL
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        _silence_stdout()  # the reader has all it wanted, as with `| head`
        return OK
    if isinstance(error, HeadraceError):
        print_error(error.reason, error.remedies)
        return error.exit_code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        help_command = f"{context.command_path} --help" if context is not None else "headrace --help"
        print_error(_no_such_option(error, arguments) or _lower_first(error.format_message()), [help_command])
        return USAGE
    if isinstance(error, MemoryError):
        print_error("the host is out of memory", ["--max-model-len N", "--kv-memory SIZE", "headrace plan MODEL"])
        return DOES_NOT_FIT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        remedies = ["HEADRACE_CACHE=FOLDER on another disk"]
        print_error(f"no space left on the disk{where}", remedies if where else ["output to another disk", *remedies])
        return DOES_NOT_FIT
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_folder():
        print_error("the folder that this was started in is gone", ["cd to one that is there", "absolute paths"])
        return USAGE
    if (missing := missing_package(error)) is not None:
        print_error(missing.reason, missing.remedies)
        return missing.exit_code
    print_error(
        f"internal error: {type(error).__name__}: {error}{_place(error)}",
        ["HEADRACE_DEBUG=1 shows where", "report it with that output"],
    )
    return INTERNAL


def _no_such_option(error: BaseException, arguments: Sequence[str]) -> str:
    """What to say of an option that other engines or other commands have; "" for other errors."""
    import click

    from ..config import all_options
    from ..other_names import other_name
    from ..settings import flag_of, variable_of

    if not isinstance(error, click.NoSuchOption):
        return ""
    name = error.option_name

    def spell(ours: str) -> str:
        has_flag = error.ctx is not None and any(param.name == ours for param in error.ctx.command.params)
        return flag_of(ours) if has_flag else variable_of(ours) if ours in all_options() else f"{ours} of a request"

    # Of letters behind one dash click names the first alone.
    typed = next((each for each in arguments if each.startswith(name)), name)
    hint = other_name(typed, spell) or other_name(name, spell)
    option = name.lstrip("-").removeprefix("no-").replace("-", "_")
    if error.ctx is not None and option in all_options() and all_options()[option][1].metadata["cli"]:
        hint = f"; it means nothing to `{error.ctx.command_path}`"
    return f"no such option {typed.partition('=')[0]!r}{hint}" if hint else ""


def _has_folder() -> bool:
    """Whether the working directory is still there."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _lower_first(message: str) -> str:
    message = message.strip().removesuffix(".")
    return message[:1].lower() + message[1:]


def _open_standard_streams() -> None:
    """Let streams that whoever started us has closed lead to nothing, so that no other file takes their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError:
        return


def _on_interrupt(number: int, _frame: FrameType | None) -> None:
    if _Interrupt.code:
        os._exit(_Interrupt.code)
    _Interrupt.code = SIGNALLED + number
    raise KeyboardInterrupt


def _on_unraisable(unraisable: "UnraisableHookArgs") -> None:
    """A Ctrl-C that hits a finalizer cannot be raised any further; end quietly instead of printing it."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(_Interrupt.code or INTERRUPTED)
    sys.__unraisablehook__(unraisable)
