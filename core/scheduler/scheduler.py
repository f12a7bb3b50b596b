"""Decides which request computes which tokens in the next step, and books what a step gave.

Prefill, decode and draft verification are one thing: a request needs its tokens, known or in flight, minus those
computed; a step has a budget of tokens. Pure: no device, no thread, no time but the clock's.
"""

import logging
from collections import deque
from collections.abc import Sequence

from ..clock import Clock
from ..config import SchedulerConfig
from ..errors import RequestError
from ..kv.block_manager import BlockManager, KVUsage
from ..kv.images import MAX_PATCHES, ImageTable
from ..models.rope import ONE_ROW, RopeRows
from ..stages import Delta, EngineRequest, FinishReason, ImageInput, KeptImage, NewRequest, Plan, Row, StepResult
from .construct import fast_init
from .limits import EncoderBudget, ImageBudget, Limit, MaxNumSeqs, Quarantine
from .policy import RequestQueue, find_policy
from .request import FINISHED, Request

logger = logging.getLogger(__name__)

make_row = fast_init(Row)
make_delta = fast_init(Delta)


class Scheduler:
    """Owns all requests: those that wait (no slot, no blocks) and those that run (one slot, blocks), both in the
    order of the policy. Plans in flight are committed in the order in which they were made.

    Preemption is recompute: a request loses slot and blocks, gets a new epoch when it comes back, and results of
    an old epoch are dropped. Nothing is lost, as noise depends on seed and position only.

    A request that the KV pool cannot hold even alone fails with an error if it is the prompt that does not fit, and
    finishes with "length" if its output does: the pool is then its context length.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        block_manager: BlockManager,
        clock: Clock,
        depth: int = 0,
        num_draft_tokens: int = 0,
        max_num_samples: int | None = None,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        rope_rows: RopeRows = ONE_ROW,
        limits: Sequence[Limit] = (),
    ) -> None:
        """depth: steps that may be in flight when another is scheduled. num_draft_tokens: drafts that a device
        brings for each decoding row, unless results say how many there are. max_num_samples: positions that a step
        may sample, drafts among them. rope_rows: prompts that use different rows of the rope tables share no KV.
        limits: besides max_num_seqs.
        """
        self.block_manager = block_manager
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_draft_tokens = 0
        """that were verified"""
        self.num_accepted_tokens = 0
        """drafts that were right"""
        self._config = config
        self._clock = clock
        self._depth = depth
        self._num_draft_tokens = num_draft_tokens
        self._max_num_samples = max_num_samples
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._rope_rows = rope_rows
        self._limits: tuple[Limit, ...] = (MaxNumSeqs(config.max_num_seqs), Quarantine(), *limits)
        if block_manager.cross is not None:
            self._limits += (EncoderBudget(config.budget, block_manager.cross),)
        if block_manager.images is not None:
            self._limits += (ImageBudget(MAX_PATCHES, block_manager.images),)
        self._place = find_policy(config)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[Plan, list[Request]]] = deque()
        self._deltas: list[Delta] = []
        self._step = 0
        self._epoch = 0
        self._num_arrived = 0

    # ---- requests in and out ----------------------------------------------------------------------------------
    def add(self, source: EngineRequest) -> None:
        """Queue a request. Raises RequestError if its id is in use, or its prompt is empty or too long."""
        num_tokens = len(source.prompt_token_ids)
        if source.request_id in self._requests:
            raise RequestError(f"request id {source.request_id!r} is in use", code="duplicate_request")
        if num_tokens == 0:
            raise RequestError("the prompt is empty: there is no token to start from", code="empty_prompt")
        if num_tokens + (source.sampling_params.max_tokens != 0) > self._max_model_len:
            raise RequestError(
                f"a prompt of {num_tokens} tokens leaves no room for output within max_model_len "
                f"{self._max_model_len}",
                code="context_length_exceeded",
                remedies=("a shorter prompt", "a larger --max-model-len"),
            )
        rope_row = self._rope_rows.row(num_tokens)
        extras = [b"rope row %d" % rope_row] if rope_row else []
        if source.encoder is not None:
            extras.append(source.encoder.digest())
        if source.lora is not None:
            extras.append(b"adapter " + source.lora.digest)
        request = Request(
            source,
            arrival=self._num_arrived,
            seed=self._config.seed,
            blocks=self.block_manager.new_request(
                cache_salt=source.cache_salt,
                extras=extras,
                num_encoder_tokens=source.num_encoder_tokens,
                images=source.images,
            ),
            max_model_len=self._max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        request.place = self._place(request)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request, without a delta. False if it is not there: it may just have finished."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request for a reason that the caller found (a stop string), without a delta. False if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        logger.debug("finish request_id=%s reason=%s stop_reason=%r", request_id, reason, stop_reason)
        self._remove(request)
        return True

    def fail(self, request_id: str, error: str) -> bool:
        """End a request with an error, which its last delta carries. False if it is not there."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "error", error)
        return request is not None

    def has_unfinished(self) -> bool:
        """True while there is a request, a step in flight or a delta that nobody took."""
        return bool(self._requests or self._in_flight or self._deltas)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    def block_tables(self) -> dict[str, Sequence[Sequence[int]]]:
        """Per running request, its block table of each KV group."""
        return {request.request_id: request.blocks.tables for request in self._running}

    def longest_wait_s(self) -> float:
        """How long the longest waiting request has been here, in seconds."""
        now_s = self._clock.now_s()
        return max((now_s - request.arrival_s for request in self._waiting), default=0.0)

    # ---- one step out -----------------------------------------------------------------------------------------
    def schedule(self) -> Plan | None:
        """The next step, or None if nothing can run before a step in flight is committed (or at all)."""
        assert len(self._in_flight) <= self._depth, f"{len(self._in_flight)} steps in flight at depth {self._depth}"
        self._step += 1
        self.block_manager.begin_step(self._step)
        rows: list[Row] = []
        scheduled: list[Request] = []
        left = self._config.budget
        num_preemptions = self.num_preemptions
        running, block_manager = self._running.requests, self.block_manager
        block_size, max_chunk = block_manager.block_size, block_manager.max_chunk
        drafts_left = self._room_for_drafts()

        index = 0
        while index < len(running) and left > 0:
            request = running[index]
            request.is_encoding = False
            computed, pending = request.num_computed_tokens, request.num_pending_tokens
            if request.images_end and computed >= request.images_end:  # not sooner: in one step, all images are kept
                block_manager.release_images(request.blocks)
            num_tokens = len(request.token_ids) + pending - computed
            num_drafts = 0
            if num_tokens <= 0 or (pending and self._must_wait(request)):
                index += 1
                continue
            if (
                num_tokens == 1
                and drafts_left > 0
                and computed + 1 >= request.num_prompt_tokens
                and not request.needs_last_token  # a draft is sampled before the host knows the token ahead of it
            ):
                room = request.max_num_tokens - 2 - computed
                known = self._num_draft_tokens if request.num_drafts is None else request.num_drafts
                num_drafts = max(0, min(known, drafts_left, left - 1, room, max_chunk - 1))
            num_tokens += num_drafts
            if num_tokens > left or num_tokens > max_chunk:
                num_tokens = min(left, max_chunk)
            if request.whole and not (num_tokens := request.cut(computed, num_tokens)):
                index += 1
                continue
            end = computed + num_tokens
            blocks = request.blocks
            if end > blocks.num_blocks * block_size or computed >= blocks.return_at:
                # With tokens in flight the device may be behind `computed`, but not behind the last known token.
                start = min(computed, len(request.token_ids) - 1)
                if num_drafts and not block_manager.grow(blocks, start=start, end=end):
                    num_tokens, num_drafts = 1, 0  # drafts are worth less than what would be preempted for them
                if not self._make_room(request, start, computed + num_tokens):
                    index += request.slot >= 0
                    continue
            rows.append(self._row(request, num_tokens, num_drafts))
            scheduled.append(request)
            left -= num_tokens
            drafts_left -= num_drafts
            index += 1

        new: list[NewRequest] = []
        while self._waiting and left > 0 and num_preemptions == self.num_preemptions:
            request = self._waiting.requests[0]
            if not self._is_possible(request):
                continue
            if not all(limit.admits(request, self._running) for limit in self._limits):
                break
            num_tokens = len(request.token_ids)
            hit = 0
            source = request.source
            if source.sampling_params.prompt_logprobs is None and not source.in_one_step:
                hit = block_manager.find_hit(request.blocks, request.token_ids)  # both need all positions
                if request.blocks.hit_grows:  # by what a row of this step writes: later is cheaper
                    break
            count = min(num_tokens - hit, left, max_chunk)
            count = request.cut(hit, count)
            if not count or (source.in_one_step and count < num_tokens):
                break
            spare = len(running) // 4  # measured: 60 % fewer preemptions for 2 % more steps
            if not block_manager.admit(
                request.blocks,
                hit=hit,
                end=hit + count,
                num_tokens=num_tokens,
                spare=spare,
                first_image=request.first_image(hit),
            ):
                break
            new.append(self._admit(request, hit))
            rows.append(self._row(request, count, 0))
            scheduled.append(request)
            left -= count

        if not rows:
            self._step -= 1
            return None
        plan = Plan(step=self._step, rows=rows, new=new)
        self._in_flight.append((plan, scheduled))
        return plan

    def _room_for_drafts(self) -> int:
        """Drafts that a step may verify beside one sample of each request that runs or may begin to."""
        if not self._num_draft_tokens or self._max_num_samples is None:
            return self._num_draft_tokens * len(self._running)
        num_running = len(self._running)
        return self._max_num_samples - min(num_running + len(self._waiting), self._config.max_num_seqs)

    def _must_wait(self, request: Request) -> bool:
        """True if a request with tokens in flight can only go on when they are known.

        Either its rows are built from them, or they end it, if all drafts are right (without drafts: surely).
        """
        return request.needs_last_token or request.num_computed_tokens + 2 > request.max_num_tokens

    def _make_room(self, request: Request, start: int, end: int) -> bool:
        """Preempt from the end of the running ones until `request` has room, or is preempted itself."""
        while not self.block_manager.grow(request.blocks, start=start, end=end):
            victim = self._running.requests[-1]
            if victim is request and len(self._running) == 1:
                if not request.num_pending_tokens:
                    self._end(request, "length")
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _is_possible(self, request: Request) -> bool:
        """End a waiting request that the pool cannot hold even alone; False if that was so."""
        num_tokens = len(request.token_ids)
        num_output_tokens = num_tokens - request.num_prompt_tokens
        capacity = self.block_manager.max_tokens_alone
        step = min(self._config.budget, self.block_manager.max_chunk)
        longest = max((end - start for start, end in request.whole), default=0)
        if longest > step:
            too_long = RequestError(
                f"an image of {longest} tokens must be computed in one step, which holds {step} tokens",
                remedies=("a larger --max-num-batched-tokens",),
            )
            self._end(request, "error", str(too_long))
            return False
        if request.source.in_one_step and num_tokens > step:
            too_long = RequestError(
                f"a prompt of {num_tokens} tokens must be computed in one step, which holds {step} tokens",
                remedies=("a shorter prompt", "a larger --max-num-batched-tokens"),
            )
            self._end(request, "error", str(too_long))
            return False
        if num_output_tokens:
            if num_tokens <= capacity:
                return True
            self._end(request, "length")
            return False
        needed = num_tokens + (request.max_num_tokens > num_tokens + 1)  # the KV of the last token is not needed
        if needed <= capacity:
            return True
        error = RequestError(
            f"a prompt of {num_tokens} tokens does not fit in the KV cache, which holds {capacity} tokens",
            remedies=("a shorter prompt", "a larger --kv-memory"),
        )
        self._end(request, "error", str(error))
        return False

    def _admit(self, request: Request, hit: int) -> NewRequest:
        """Move the head of the waiting ones to the running ones."""
        self._waiting.remove(request)
        self._running.add(request)
        self._epoch += 1
        request.epoch = self._epoch
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = hit
        self.num_hit_tokens += hit
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = hit
        cross, images, source = request.blocks.cross, request.blocks.images, request.source
        encodes_images = images is not None and any(images.must_write)
        request.is_encoding = encodes_images or (cross is not None and cross.must_write)
        return NewRequest(
            request_id=request.request_id,
            epoch=request.epoch,
            slot=request.slot,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=hit,
            sampling_params=source.sampling_params,
            seed=request.seed,
            stop_token_ids=tuple(request.stop_ids),
            bad_word_ids=source.bad_word_ids,
            pooling=source.pooling,
            token_types=source.token_types,
            encoder=source.encoder if request.is_encoding else None,
            num_encoder_tokens=source.num_encoder_tokens,
            cross_spans=source.cross_spans,
            images=() if images is None else _kept_images(source.images, images),
            adapter=-1 if source.lora is None else source.lora.number,
        )

    def _row(self, request: Request, num_tokens: int, num_drafts: int) -> Row:
        """Book a row that has room."""
        pending, blocks = request.num_pending_tokens, request.blocks
        start = None if pending else request.num_computed_tokens
        computed = request.num_computed_tokens = request.num_computed_tokens + num_tokens
        num_known = len(request.token_ids)
        sample = computed >= num_known + pending and not request.is_prompt_only
        if sample:
            request.num_pending_tokens = pending + 1 + num_drafts
        request.last_step = self._step
        if blocks.publish_at <= computed and blocks.publish_at <= num_known:
            self.block_manager.publish(blocks, request.token_ids, computed, self._step)
        grew = blocks.num_told < blocks.num_blocks
        return make_row(
            request_id=request.request_id,
            epoch=request.epoch,
            slot=request.slot,
            num_tokens=num_tokens,
            num_draft_tokens=num_drafts,
            sample=sample,
            start=start,
            new_blocks=self.block_manager.tell(blocks) if grew else self.block_manager.nothing_new,
        )

    # ---- one step in ------------------------------------------------------------------------------------------
    def commit(self, plan: Plan, result: StepResult) -> list[Delta]:
        """Book the result of the oldest plan in flight; the deltas since the last time, its own among them."""
        expected, requests = self._in_flight.popleft()
        assert plan is expected and result.step == plan.step, f"step {result.step} is not the oldest in flight"
        if result.error:
            self._fail_step(plan, requests, result.error)
            return self.take_deltas()
        self.block_manager.step_done(plan.step)
        deltas = self._deltas
        logprobs, prompt_logprobs, forced = result.logprobs, result.prompt_logprobs, result.forced
        for index, (row, request, token_ids) in enumerate(zip(plan.rows, requests, result.token_ids, strict=True)):
            if request.epoch != row.epoch:  # preempted, aborted or finished meanwhile
                continue
            if index in result.failed:
                self._end(request, "error", result.failed[index], is_own_error=True)
                continue
            if result.num_drafts is not None:
                request.num_drafts = min(result.num_drafts.get(index, 0), self._num_draft_tokens)
            reason: FinishReason | None = None
            if row.sample:
                count = len(token_ids)
                assert 0 < count <= row.num_draft_tokens + 1, f"{request.request_id}: {count} tokens sampled"
                request.num_pending_tokens -= 1 + row.num_draft_tokens
                request.num_computed_tokens -= 1 + row.num_draft_tokens - count
                self.num_draft_tokens += row.num_draft_tokens
                self.num_accepted_tokens += count - 1
                if index in forced:
                    token_ids = [*token_ids, *forced[index]]
                for taken, token_id in enumerate(token_ids, 1):
                    reason = request.append(token_id)
                    if reason is not None:
                        token_ids = token_ids[:taken]
                        break
            elif request.is_prompt_only and row.start is not None:
                reason = "length" if row.start + row.num_tokens >= request.num_prompt_tokens else None
            if request.max_company:
                self._clear(request, row)
            if token_ids or reason is not None or index in prompt_logprobs:
                is_stop = reason == "stop"
                deltas.append(
                    make_delta(
                        request_id=request.request_id,
                        token_ids=token_ids,
                        finish_reason=reason,
                        stop_reason=request.stop_ids[token_ids[-1]] if is_stop else None,
                        num_cached_tokens=request.num_cached_tokens,
                        logprobs=logprobs[index][: len(token_ids)] if index in logprobs else (),
                        prompt_logprobs=prompt_logprobs.get(index, ()),
                        pooled=result.pooled.get(index),
                    )
                )
            if reason is not None:
                self._remove(request)
            elif request.blocks.publish_at <= request.num_computed_tokens:
                self._publish(request)
        return self.take_deltas()

    def take_deltas(self) -> list[Delta]:
        """The deltas that no commit has returned yet: of requests that schedule() or fail() ended."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def device_lost(self, error: str) -> None:
        """All that the device held is gone, and so are the steps in flight, whose requests are suspects.

        All running requests wait again; the executor must be restarted before the next step.
        """
        self.block_manager.forget_all()
        suspects = {
            request.request_id: request
            for plan, requests in self._in_flight
            for row, request in zip(plan.rows, requests, strict=True)
            if request.epoch == row.epoch
        }
        self._in_flight.clear()
        self._suspect(list(suspects.values()), error)
        for request in list(self._running):
            self._preempt(request)

    def _fail_step(self, plan: Plan, requests: Sequence[Request], error: str) -> None:
        """Undo a step, and those in flight behind it, which may have read what it did not write."""
        self.block_manager.step_failed(plan.step)
        alive = [r for row, r in zip(plan.rows, requests, strict=True) if r.epoch == row.epoch]
        self._suspect(alive, error)
        for later, later_requests in self._in_flight:
            for row, request in zip(later.rows, later_requests, strict=True):
                if request.epoch == row.epoch and request.slot >= 0:
                    self._preempt(request)

    def _suspect(self, suspects: Sequence[Request], error: str) -> None:
        """Preempt the requests of a failed step. They come back in halves; who fails alone, twice, is at fault."""
        logger.warning("step failed error=%r num_suspects=%d", error, len(suspects))
        for request in suspects:
            is_at_fault = len(suspects) == 1 and request.max_company == 1
            request.max_company = max(1, len(suspects) // 2)
            request.suspect_until = max(request.suspect_until, request.num_computed_tokens)
            self._preempt(request)  # before it ends: what the step computed must not be published
            if is_at_fault:
                self._end(request, "error", error)

    def _clear(self, request: Request, row: Row) -> None:
        """A suspect that got past the place where its step failed is none any more."""
        done = len(request.token_ids) - 1 if row.sample else (row.start or 0) + row.num_tokens
        if done >= request.suspect_until:
            request.max_company = request.suspect_until = 0

    # ---- transitions ------------------------------------------------------------------------------------------
    def _preempt(self, request: Request) -> None:
        """Back to the waiting ones, to be computed again from the start (or from a prefix hit)."""
        self._running.remove(request)
        self._release(request)
        request.epoch = 0
        self._waiting.add(request)
        self.num_preemptions += 1

    def _end(self, request: Request, reason: FinishReason, error: str = "", *, is_own_error: bool = False) -> None:
        """End a request outside of a commit; the next one, or take_deltas, tells it."""
        self._remove(request)
        self._deltas.append(
            make_delta(
                request_id=request.request_id,
                token_ids=(),
                finish_reason=reason,
                num_cached_tokens=max(0, request.num_cached_tokens),
                error=error,
                is_own_error=is_own_error,
            )
        )

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.slot >= 0:
            self._publish(request)
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.epoch = FINISHED

    def _publish(self, request: Request) -> None:
        self.block_manager.publish(request.blocks, request.token_ids, request.num_computed_tokens, request.last_step)

    def _release(self, request: Request) -> None:
        self.block_manager.release(request.blocks)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_computed_tokens = request.num_pending_tokens = 0
        request.num_drafts = None

    # ---- figures and checks -----------------------------------------------------------------------------------
    def kv_usage(self) -> KVUsage:
        """What the running requests hold of the KV cache and use of it."""
        return self.block_manager.usage((request.blocks, request.num_computed_tokens) for request in self._running)

    def check_integrity(self) -> None:
        """Assert the invariants of requests, slots and blocks."""
        running, waiting = list(self._running), list(self._waiting)
        self.block_manager.check_integrity([request.blocks for request in running])
        both = running + waiting
        assert len(both) == len(self._requests) == len({id(request) for request in both}), "a request is lost"
        slots = sorted([request.slot for request in running] + self._free_slots)
        assert slots == list(range(self._config.max_num_seqs)), f"slots {slots}"
        for queue in (running, waiting):
            assert [r.place for r in queue] == sorted(r.place for r in queue), "out of order"
        for request in waiting:
            assert request.slot == -1 and request.epoch == 0 and request.blocks.num_blocks == 0, request.request_id
            assert request.num_computed_tokens == request.num_pending_tokens == 0, request.request_id
        for request in running:
            self._check_running(request)

    def _check_running(self, request: Request) -> None:
        num_known, computed = len(request.token_ids), request.num_computed_tokens
        pending = sum(
            1 + row.num_draft_tokens
            for plan, requests in self._in_flight
            for row, other in zip(plan.rows, requests, strict=True)
            if other is request and row.epoch == request.epoch and row.sample
        )
        assert request.num_pending_tokens == pending, f"{request.request_id}: {pending} tokens are in flight"
        assert computed <= num_known + request.num_pending_tokens, request.request_id
        assert computed <= request.blocks.num_blocks * self.block_manager.block_size, request.request_id
        limit = max(request.max_num_tokens - 1, request.num_prompt_tokens)
        assert computed <= limit, f"{request.request_id}: a position that no token needs"
        assert num_known < request.max_num_tokens or request.is_prompt_only, request.request_id


def _kept_images(images: Sequence[ImageInput], table: ImageTable) -> list[KeptImage]:
    return [
        KeptImage(image=image, blocks=blocks, must_encode=must_encode)
        for image, blocks, must_encode in zip(images, table.blocks, table.must_write, strict=True)
    ]
