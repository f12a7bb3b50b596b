"""The engine's process, run in a thread: a grammar that takes long to compile holds up nobody else."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace import SamplingParams, StructuredOutputParams
from headrace.core.server import engine_process
from headrace.core.server.engine_process import EngineProcess
from headrace.core.server.frames import (
    Abort,
    Add,
    FrameSplitter,
    Ready,
    Start,
    StepFrame,
    Stop,
    ToFront,
    pack,
    params_to_wire,
)
from headrace.core.structured.compiler import GrammarCache


class Front:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._splitter = FrameSplitter()
        self._decoder: Any = msgspec.msgpack.Decoder(ToFront)
        self.accepted: list[str] = []
        self.finished: list[str] = []

    def send(self, message: Any) -> None:
        """To the engine."""
        self._socket.sendall(pack(message))

    def messages(self) -> Iterator[Any]:
        """What the engine says."""
        while data := self._socket.recv(1 << 16):
            yield from [self._decoder.decode(frame) for frame in self._splitter.push(data)]

    def wait_for(self, request_id: str) -> None:
        """Until a completion has finished."""
        for message in self.messages():
            if isinstance(message, StepFrame):
                self.accepted += message.accepted
                self.finished += [output.request_id for output in message.outputs if output.finish_reason]
            if request_id in self.finished:
                return


def test_steps_do_not_wait_for_a_grammar(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "configure_logging", lambda config: None)
    compile_now, may_go_on, has_left = GrammarCache.compile, threading.Event(), threading.Event()

    def leave(code: int) -> None:
        has_left.set()
        threading.Event().wait()  # a daemon, whose process goes on here

    monkeypatch.setattr(engine_process, "os", SimpleNamespace(_exit=leave, getpid=os.getpid))

    def slow_compile(self: GrammarCache, params: StructuredOutputParams) -> Any:
        assert may_go_on.wait(60) and threading.current_thread().name.startswith("grammars")
        grammar = compile_now(self, params)
        monkeypatch.setattr(GrammarCache, "compile", compile_now)
        return grammar

    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    front = Front(ours)
    thread = threading.Thread(target=EngineProcess(theirs).run)
    thread.start()
    options = {"model": str(model_folder), "device": "null", "load_format": "dummy", "kv_memory": "8MiB"}
    front.send(Start(options=options))
    assert isinstance(next(front.messages()), Ready)
    monkeypatch.setattr(GrammarCache, "compile", slow_compile)

    plain = params_to_wire(SamplingParams(max_tokens=20, ignore_eos=True))
    form = StructuredOutputParams(kind="choice", value=["yes", "no"])
    structured = params_to_wire(SamplingParams(max_tokens=20, structured_output=form))
    for request_id, wire in (("slow", structured), ("gone", structured), ("a", plain)):
        front.send(Add(request_id=request_id, prompt_token_ids=[5, 6, 7], sampling_params=wire))
    front.wait_for("a")
    front.send(Abort(request_ids=["gone"]))
    front.send(Add(request_id="b", prompt_token_ids=[5, 6, 7], sampling_params=plain))
    front.wait_for("b")
    assert front.finished == front.accepted == ["a", "b"]
    may_go_on.set()
    front.wait_for("slow")
    assert front.accepted == ["a", "b", "slow"]
    front.send(Stop())
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    assert has_left.wait(30)
    theirs.close()
