"""The front's side of the engine: hands out work, delivers what comes back, and survives the engine's death."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from .. import errors
from ..config import EngineConfig, lora_pairs
from ..errors import HeadraceError
from ..stages import EncoderInput
from .admission import Admission
from .api_errors import ApiError, ClientGone
from .engine_link import EngineLink, SpareFiles
from .frames import (
    Abort,
    Add,
    Failed,
    ImageFrame,
    LoraDone,
    Output,
    Ready,
    SetLora,
    Stats,
    StepFrame,
    StepTrace,
    ToFront,
    Watch,
)
from .generation import Completion, Generation
from .metrics import Metrics
from .quarantine import Quarantine

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "failed", "stopped"]

_MAX_FAILED_STARTS = 3
"""Restarts in a row that may fail before the server gives up."""
_TRY_AGAIN_S = 0.5
_MAX_TRIES = 240
"""To get a process from a system that has none: two minutes."""
_STOP_TIMEOUT_S = 10.0
_PROBE_S = 5.0
"""An idle engine is asked so often whether it is there."""


class EngineClient:
    """Owns the engine process and every accepted request. Runs in one event loop.

    A request waits in `admission`, is then in the engine (its completions have `is_sent`), and is done. When the
    process dies, another one is started and all that were in it are sent again with the tokens they had.
    """

    def __init__(
        self, config: EngineConfig, admission: Admission, metrics: Metrics, on_done: Callable[[Generation], None]
    ) -> None:
        self.config = config
        self.admission = admission
        self.state: State = "loading"
        self.info: Ready | None = None
        self.stats = Stats(0, 0, 0, 0, 0, 0)
        self.num_restarts = 0
        self._metrics = metrics
        self._on_done = on_done
        self._options = {k: v for k, v in config.to_options().items() if not hasattr(config.server, k)}
        # What is sent ahead of a free slot waits in the engine, where no other key can overtake it.
        self._window = config.scheduler.max_num_seqs + (config.scheduler.max_num_seqs + 2) // 4
        self._generations: set[Generation] = set()
        self._in_engine: dict[str, Completion] = {}
        self._quarantine = Quarantine()
        self._link = EngineLink(self._on_message, self._on_lost)
        self._spare = SpareFiles()
        self._ready: asyncio.Future[Ready] | None = None
        self._num_failed_starts = 0
        self._last_step_s = time.monotonic()
        self._probed_s: float | None = None  # when an idle engine was asked for a step that has not come
        self._restarting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._stalled: EngineLink | None = None  # whose process was killed, as it made no step
        self.failed = asyncio.Event()
        self.on_trace: Callable[[StepTrace], None] | None = None
        """gets the steps while they are watched"""
        self._is_watched = False
        self.loras = lora_pairs(config.model.lora)
        """folders of adapters by name"""
        self._setting: dict[str, tuple[str, asyncio.Future[LoraDone]]] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that are not done."""
        return len(self._generations)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._link.pid

    async def start(self) -> Ready:
        """Start the process and wait until the engine is loaded. Raises the error that the engine failed with."""
        self._ready = asyncio.get_running_loop().create_future()
        self._watch_steps()
        await self._link.start(self._options)
        return await self._ready

    async def stop(self) -> None:
        """End the process. What is not done fails."""
        self.state = "stopped"
        if self._restarting is not None:
            self._restarting.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        self._spare.release()
        await self._link.stop(_STOP_TIMEOUT_S)

    def submit(self, generation: Generation) -> None:
        """Queue a request whose completions are set. Raises ApiError if there is no room."""
        self.admission.check(generation.key, generation.num_prompt_tokens)
        self._generations.add(generation)
        self.admission.push(generation)
        self._dispatch()

    def cancel(self, generation: Generation, failure: ApiError | ClientGone) -> None:
        """End a request early; its blocks are free after the step that runs."""
        generation.fail(failure)

    def generation_done(self, generation: Generation) -> None:
        """What a generation calls when it is done: take it out wherever it is."""
        self._generations.discard(generation)
        to_abort = []
        for completion in generation.completions:
            completion.is_finished = True
            if self._in_engine.pop(completion.request_id, None) is not None:
                to_abort.append(completion.request_id)
            self._progressed(completion)
        if to_abort:
            self._link.send(Abort(request_ids=to_abort))
        self.admission.ended(generation)
        self._on_done(generation)
        self._dispatch()

    def fail_all(self, failure: ApiError) -> None:
        """End all requests with an error."""
        for generation in list(self._generations):
            generation.fail(failure)

    def watch(self, is_on: bool) -> None:
        """Have each step described, or no longer."""
        self._is_watched = is_on
        if self.state == "ready":
            self._link.send(Watch(is_on=is_on))

    async def set_lora(self, name: str, folder: str) -> None:
        """Have an adapter loaded from a folder, or unloaded (""), also for later processes. Raises ApiError."""
        if self.state != "ready" or name in self._setting:
            reason = f"adapter {name!r} is being changed" if name in self._setting else "the engine is not ready"
            raise ApiError(503, reason, code="engine_busy", headers={"Retry-After": "1"})
        waiting: asyncio.Future[LoraDone] = asyncio.get_running_loop().create_future()
        self._setting[name] = folder, waiting
        self._link.send(SetLora(name=name, folder=folder))
        done = await waiting
        if done.error:
            raise ApiError(404 if done.code == "lora_not_found" else 400, done.error, code=done.code)

    def stalled_s(self) -> float:
        """For how long the engine has not made a step that it should have, in seconds; 0 while it is loading."""
        since_s = self._last_step_s if self._in_engine else self._probed_s
        if self.state != "ready" or since_s is None:
            return 0.0
        return time.monotonic() - since_s

    def _watch_steps(self) -> None:
        """Kill a process that makes no step; what follows is as after a crash. An idle one is asked for a step."""
        if self.state == "ready":
            self._spare.keep()
        limit_s, stalled_s = self.config.server.stall_restart_s, self.stalled_s()
        if stalled_s >= limit_s and self._stalled is not self._link:
            self._stalled = self._link
            logger.error("the engine is stalled", extra={"fields": {"seconds": round(stalled_s, 1), "pid": self.pid}})
            self._link.end_process()
        interval_s = min(_PROBE_S, self.config.server.stall_timeout_s / 4)
        is_due = time.monotonic() - self._last_step_s >= interval_s
        if self.state == "ready" and not self._in_engine and self._probed_s is None and is_due:
            self._probed_s = time.monotonic()
            self._link.send(Abort(request_ids=[]))
        self._watch = asyncio.get_running_loop().call_later(min(1.0, interval_s, limit_s / 4), self._watch_steps)

    # ---- work to the engine -----------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        """Send what the engine has room for, with a little more so that no slot is empty for a step."""
        if self.state != "ready" or self._quarantine.is_active:
            return
        while len(self._in_engine) < self._window:
            completion = self.admission.pop()
            if completion is None:
                return
            self._send(completion)

    def _send(self, completion: Completion) -> None:
        if not self._in_engine:
            self._last_step_s = time.monotonic() if self._probed_s is None else self._probed_s
        completion.is_sent = True
        self._in_engine[completion.request_id] = completion
        self._link.send(
            Add(
                request_id=completion.request_id,
                prompt_token_ids=completion.prompt_token_ids,
                sampling_params=completion.sampling_params,
                priority=completion.priority,
                cache_salt=completion.cache_salt,
                output_token_ids=completion.output_token_ids,
                pooling=completion.is_pooling,
                token_types=completion.token_types,
                **_encoder_fields(completion.encoder),
                images=[ImageFrame.of(image) for image in completion.images],
                lora=completion.lora,
            )
        )

    # ---- news from the engine ---------------------------------------------------------------------------------
    def _on_message(self, message: ToFront) -> None:
        if isinstance(message, StepFrame):
            self._on_step(message)
        elif isinstance(message, LoraDone):
            self._lora_done(message)
        elif isinstance(message, Ready):
            self.info = message
            self.stats = Stats(0, 0, message.num_blocks, message.num_blocks, 0, 0)
            self.state = "ready"
            self._num_failed_starts = 0
            self._last_step_s = time.monotonic()
            self._probed_s = None
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
            if self._is_watched:
                self._link.send(Watch(is_on=True))
            self._release_suspects()
        elif self._ready is not None and not self._ready.done():
            self._ready.set_exception(_as_error(message))
        else:
            logger.error("the engine cannot be restarted", extra={"fields": {"reason": message.reason}})

    def _lora_done(self, message: LoraDone) -> None:
        """An adapter has come or gone, also for whoever does not wait for it any more."""
        folder, waiting = self._setting.pop(message.name)
        if not message.error:
            self.loras = {name: path for name, path in {**self.loras, message.name: folder}.items() if path}
            self._options["lora"] = [f"{name}={path}" for name, path in self.loras.items()]
        if not waiting.done():
            waiting.set_result(message)

    def _on_step(self, frame: StepFrame) -> None:
        now_s = self._last_step_s = time.monotonic()
        self._probed_s = None
        self.stats = frame.stats
        self._metrics.stepped(sum(len(output.token_ids) for output in frame.outputs))
        for request_id in frame.accepted:
            accepted = self._in_engine.get(request_id)
            if accepted is not None:
                accepted.generation.accepted()
        for output in frame.outputs:
            completion = self._in_engine.get(output.request_id)
            if completion is not None:
                self._on_output(completion, output, now_s)
        if frame.trace is not None and self.on_trace is not None:
            self.on_trace(frame.trace)
        self._dispatch()

    def _on_output(self, completion: Completion, output: Output, now_s: float) -> None:
        generation = completion.generation
        is_first = generation.first_token_s is None
        if output.token_ids:
            completion.output_token_ids += output.token_ids
            if completion.last_token_s:
                self._metrics.itl_s.observe(now_s - completion.last_token_s)
            else:
                self._metrics.started(len(completion.prompt_token_ids), output.num_cached_tokens)
            completion.last_token_s = now_s
        if output.finish_reason is not None:
            completion.is_finished = True
            del self._in_engine[completion.request_id]
            self.admission.completed(completion)
        if completion.suspect_until >= 0:
            self._progressed(completion)
        generation.push(completion, output, now_s)
        if is_first and generation.first_token_s is not None:
            self._metrics.ttft_s.observe(now_s - generation.arrival_s)
            self.admission.started(generation)

    # ---- death of the engine ----------------------------------------------------------------------------------
    def _on_lost(self, link: EngineLink) -> None:
        if self.state == "stopped":
            return
        self.state = "restarting" if self.info is not None else "loading"
        for name in list(self._setting):
            self._lora_done(LoraDone(name=name, error="the engine process ended meanwhile", code="engine_failed"))
        in_engine = list(self._in_engine.values())
        self._in_engine.clear()
        for completion in in_engine:
            completion.is_sent = False
        culprit = self._quarantine.crashed(in_engine) if in_engine else None
        self._restarting = asyncio.get_running_loop().create_task(self._restart(link, culprit, len(in_engine)))

    async def _restart(self, lost: EngineLink, culprit: Completion | None, num_in_engine: int) -> None:
        """Start another process; the requests follow when it is ready."""
        how = await lost.exit_status()
        if lost is self._stalled:
            how = f"no step for {self.config.server.stall_restart_s} s, then {how}"
            self._stalled = None
        if self._ready is not None and not self._ready.done():
            reason = f"the engine process ended while it loaded the model ({how})"
            self._ready.set_exception(HeadraceError(reason, remedies=["HEADRACE_DEBUG=1", "--device reference"]))
            return
        if self._ready is not None and self._ready.exception() is not None:
            return
        self.num_restarts += 1
        self._metrics.restarts += 1
        fields: dict[str, Any] = {"ended": how, "requests_in_engine": num_in_engine}
        logger.error("the engine process died, starting another", extra={"fields": fields})
        if culprit is not None:
            self._metrics.poisoned += 1
            request_id = culprit.generation.id
            logger.error("request killed the engine twice", extra={"fields": {"request_id": request_id}})
            message = f"request {request_id} killed the engine process twice ({how}) and is not tried again"
            culprit.generation.fail(ApiError(500, message, code="poison_request"))
        self._num_failed_starts += 1
        if self._num_failed_starts > _MAX_FAILED_STARTS:
            self._give_up(how)
            return
        if self._num_failed_starts > 1:
            await asyncio.sleep(2.0 ** (self._num_failed_starts - 2))
        if not await self._start_process():
            self._give_up("the system gives no process for it")

    async def _start_process(self) -> bool:
        """Start a process with the descriptors that were kept for it. False if there is none for a while: clients
        that leave, or other programs that end, make room."""
        for number in range(_MAX_TRIES):
            try:
                self._spare.release()
                self._link = EngineLink(self._on_message, self._on_lost)
                await self._link.start(self._options)
            except OSError as error:
                if number == 0:
                    logger.error("no process for the engine", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                return True
        return False

    def _give_up(self, how: str) -> None:
        self.state = "failed"
        self.fail_all(ApiError(500, f"the engine cannot be restarted ({how})", code="engine_failed"))
        self.failed.set()

    def _release_suspects(self) -> None:
        """Send the next group of suspects, or go back to normal if there is none."""
        for completion in self._quarantine.next_group(len(self._in_engine)):
            self._send(completion)
        self._dispatch()

    def _progressed(self, completion: Completion) -> None:
        if self._quarantine.progressed(completion) and self.state == "ready":
            self._release_suspects()


def _encoder_fields(encoder: EncoderInput | None) -> dict[str, Any]:
    """The fields of Add for an encoder's input."""
    if encoder is None:
        return {}
    if encoder.features is None:
        return {"encoder_token_ids": list(encoder.token_ids)}
    return {"encoder_features": encoder.features.tobytes(), "num_features": encoder.features.shape[1]}


def _as_error(message: Failed) -> HeadraceError:
    """The error that the engine process failed with, in its own class."""
    kind = getattr(errors, message.kind, HeadraceError)
    error: HeadraceError = kind(message.reason, remedies=message.remedies)
    return error
