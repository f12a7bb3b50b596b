"""The engine's process: builds the engine, then steps it, answering each step with one frame.

python -m headrace.core.server.engine_process FD, where FD is the socket to the front. The process ends when the
front does: the socket closes.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from ..cli.logs import configure_logging
from ..config import EngineConfig
from ..engine.build import Built, build_engine
from ..errors import HeadraceError, RequestError
from ..extras import missing_package
from ..stages import EncoderInput, Logprob, RequestOutput
from .frames import (
    READ_BYTES,
    Abort,
    Add,
    Failed,
    FrameSplitter,
    LogprobEntry,
    LoraDone,
    Output,
    Ready,
    SetLora,
    Start,
    Stats,
    StepFrame,
    Stop,
    ToEngine,
    ToFront,
    TokenEntries,
    Watch,
    pack,
    params_from_wire,
    params_to_wire,
)
from .step_trace import StepTracer

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 10
"""Steps in a row that raise something unexpected before the process gives up and leaves it to the front."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What took long about a completion has been done: it can be added now."""

    add: Add


class EngineProcess:
    """Owns the engine and its side of the socket. A thread reads; the main thread steps and writes; another one
    compiles grammars, so that no step waits for one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox: queue.SimpleQueue[ToEngine | Prepared | None] = queue.SimpleQueue()
        self._compiling: set[str] = set()
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._num_failed = 0
        self._tracer: StepTracer | None = None

    def run(self) -> None:
        """Until the front says stop, or is gone."""
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        start = self._inbox.get()
        if not isinstance(start, Start):
            return
        config = EngineConfig.from_options(start.options)
        configure_logging(config.log)
        try:
            built = build_engine(config, lambda line: logger.info("%s", line))
        except Exception as error:
            failed = error if isinstance(error, HeadraceError) else missing_package(error, "the model")
            if failed is None:
                raise
            self._send(Failed(kind=type(failed).__name__, reason=failed.reason, remedies=list(failed.remedies)))
            return
        self._send(_ready(built))
        try:
            self._serve(built)
        finally:
            self._grammars.shutdown(wait=False, cancel_futures=True)
            built.engine.close()
            built.device.close()

    def _serve(self, built: Built) -> None:
        engine = built.engine
        while True:
            commands = self._take(wait=not engine.has_unfinished())
            accepted: list[str] = []
            outputs: list[Output] = []
            for command in commands:
                if command is None or isinstance(command, Stop):
                    return
                self._handle(built, command, accepted, outputs)
            if accepted and engine.has_unfinished():
                # A step may take long; the headers of an answer need not wait for it.
                self._send(StepFrame(outputs=outputs, accepted=accepted, stats=_stats(built)))
                accepted, outputs = [], []
            started_s = time.monotonic()
            if engine.has_unfinished():
                outputs += self._step(built)
            trace = None if self._tracer is None else self._tracer.trace(time.monotonic() - started_s)
            self._send(StepFrame(outputs=outputs, accepted=accepted, stats=_stats(built), trace=trace))

    def _handle(
        self, built: Built, command: "ToEngine | Prepared", accepted: list[str], outputs: list[Output]
    ) -> None:
        """Do what the front wants; ids that were accepted, and refusals, go into the lists."""
        if isinstance(command, Abort):
            for request_id in command.request_ids:
                self._compiling.discard(request_id)
                built.engine.abort(request_id)
        elif isinstance(command, SetLora):
            self._send(_set_lora(built, command))
        elif isinstance(command, Watch):
            self._tracer = StepTracer(built.engine) if command.is_on else None
        elif isinstance(command, Prepared):
            if command.add.request_id in self._compiling:  # else it was aborted meanwhile
                self._compiling.discard(command.add.request_id)
                self._add(built, command.add, accepted, outputs)
        elif isinstance(command, Add) and not self._prepares(built, command):
            self._add(built, command, accepted, outputs)

    def _add(self, built: Built, command: Add, accepted: list[str], outputs: list[Output]) -> None:
        refusal = _add(built, command)
        if refusal is None:
            accepted.append(command.request_id)
        else:
            outputs.append(refusal)

    def _prepares(self, built: Built, command: Add) -> bool:
        """True if a thread has to compile a grammar before the completion can be added; it then comes back."""
        try:
            params = params_from_wire(command.sampling_params)
            if built.engine.is_prepared(params):
                return False
        except RequestError:
            return False  # adding it tells what is wrong

        def compile_grammar() -> None:
            try:
                built.engine.prepare(params)
            except HeadraceError as error:
                logger.debug("a grammar cannot be compiled: %s", error)  # adding it tells so
            finally:
                self._inbox.put(Prepared(command))

        self._compiling.add(command.request_id)
        self._grammars.submit(compile_grammar)
        return True

    def _step(self, built: Built) -> list[Output]:
        try:
            outputs = built.engine.step()
        except Exception:
            # The failed step's requests are suspects of the scheduler, which goes on with the others.
            self._num_failed += 1
            logger.exception("a step failed in a way that nobody foresaw")
            if self._num_failed >= _MAX_FAILED_STEPS:
                raise
            return []
        self._num_failed = 0
        return [_output(output) for output in outputs if _has_news(output)]

    def _take(self, *, wait: bool) -> list[ToEngine | Prepared | None]:
        """All commands that are there; waits for the first if there is nothing else to do."""
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _send(self, message: ToFront) -> None:
        self._socket.sendall(pack(message))

    def _read(self) -> None:
        splitter = FrameSplitter()
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                # The front is gone, and with it all whom a result could interest; a step may take long.
                os._exit(0)
            for frame in splitter.push(data):
                self._inbox.put(decoder.decode(frame))


def main() -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the front decides when to end
        signal.signal(number, signal.SIG_IGN)
    try:
        EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()
    except BrokenPipeError:
        return


def _ready(built: Built) -> Ready:
    return Ready(
        pid=os.getpid(),
        model=built.model.name,
        max_model_len=built.capacity.max_model_len,
        vocab_size=built.model.spec.vocab_size,
        num_blocks=_stats(built).num_blocks,
        device=built.device.info.id,
        eos_token_ids=list(built.defaults.eos_token_ids),
        logits_processors=sorted(built.engine.processors),
        sampling_params=params_to_wire(built.defaults.sampling_params),
        reads_images=built.model.spec.vision is not None,
    )


def _add(built: Built, command: Add) -> Output | None:
    """Queue a completion; what to answer if it is refused."""
    try:
        if command.pooling:
            built.engine.add_pooling(
                command.request_id,
                command.prompt_token_ids,
                token_types=command.token_types,
                priority=command.priority,
                cache_salt=command.cache_salt,
            )
            return None
        built.engine.add(
            command.request_id,
            command.prompt_token_ids,
            params_from_wire(command.sampling_params),
            priority=command.priority,
            cache_salt=command.cache_salt,
            deltas=True,
            output_token_ids=command.output_token_ids,
            encoder=_encoder(command),
            images=[frame.image() for frame in command.images],
            lora=command.lora,
        )
    except RequestError as error:
        return Output(
            request_id=command.request_id,
            text="",
            token_ids=[],
            finish_reason="error",
            error=str(error),
            code=error.code,
        )
    return None


def _set_lora(built: Built, command: SetLora) -> LoraDone:
    try:
        if command.folder:
            built.engine.load_lora(command.name, command.folder)
        else:
            built.engine.unload_lora(command.name)
    except HeadraceError as error:
        return LoraDone(name=command.name, error=str(error), code=getattr(error, "code", "invalid_adapter"))
    return LoraDone(name=command.name)


def _encoder(command: Add) -> EncoderInput | None:
    if command.num_features:
        flat = np.frombuffer(command.encoder_features, np.float32)
        return EncoderInput(features=flat.reshape(-1, command.num_features))
    return EncoderInput(token_ids=command.encoder_token_ids) if command.encoder_token_ids else None


def _has_news(output: RequestOutput) -> bool:
    """False for a chunk of a prompt."""
    completion = output.outputs[0]
    return bool(completion.token_ids or completion.finish_reason or completion.text or output.prompt_logprobs)


def _output(output: RequestOutput) -> Output:
    completion = output.outputs[0]
    prompt_logprobs: list[TokenEntries | None] | None = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = [None if entry is None else _entries(entry) for entry in output.prompt_logprobs]
    return Output(
        request_id=output.request_id,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        logprobs=None if completion.logprobs is None else [_entries(entry) for entry in completion.logprobs],
        prompt_logprobs=prompt_logprobs,
        scheduled_s=None if output.timings is None else output.timings.scheduled_s,
        error=output.error,
        code="structured_output_failed" if output.is_own_error else "",
        pooled=None if output.pooled is None else output.pooled.astype("float32").tobytes(),
    )


def _entries(entry: dict[int, Logprob]) -> TokenEntries:
    return [
        LogprobEntry(
            token_id=token_id,
            logprob=found.logprob,
            rank=found.rank,
            text=found.decoded_token,
            token_bytes=bytes(found.bytes),
        )
        for token_id, found in entry.items()
    ]


def _stats(built: Built) -> Stats:
    scheduler = built.engine.scheduler
    pools = scheduler.block_manager.pools
    return Stats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_blocks=sum(pool.num_blocks - 1 for pool in pools),
        num_free_blocks=sum(pool.num_free for pool in pools),
        num_preemptions=scheduler.num_preemptions,
        num_hit_tokens=scheduler.num_hit_tokens,
        num_draft_tokens=scheduler.num_draft_tokens,
        num_accepted_tokens=scheduler.num_accepted_tokens,
    )


if __name__ == "__main__":
    main()
