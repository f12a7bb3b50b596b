"""From the scheduler's deltas to what users see: text, log probabilities, finished requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..sampling.params import SamplingParams
from ..stages import (
    CompletionOutput,
    Delta,
    EncoderInput,
    FinishReason,
    FloatArray,
    Logprob,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class _Completion:
    """One of a request's n completions as it grows."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(slots=True, kw_only=True)
class _Group:
    """A user's request: its prompt and completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    completions: list[_Completion]
    arrival_s: float
    final_only: bool
    deltas: bool
    prompt_logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    num_cached_tokens: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    pooled: FloatArray | None = None
    error: str = ""
    is_own_error: bool = False
    gave_prompt: bool = False
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A completion that its text ended; the scheduler does not know yet."""

    child_id: str
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """What one step's deltas came to."""

    outputs: Sequence[RequestOutput]
    stopped: Sequence[Stopped]


class OutputProcessor:
    """Owns the text and log probabilities of unfinished requests. A completion is known by its child id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, tuple[_Group, int]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, child_id: str) -> bool:
        return child_id in self._groups

    def add(
        self,
        request_id: str,
        child_ids: Sequence[str],
        *,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        arrival_s: float,
        final_only: bool = False,
        deltas: bool = False,
        output_token_ids: Sequence[int] = (),
        encoder: EncoderInput | None = None,
        encoder_prompt: str | None = None,
    ) -> None:
        """Begin a request with one completion for each child id. final_only: give one output, when it is finished.
        deltas: outputs hold only what is new. output_token_ids: tokens whose text and log probabilities are out."""
        detokenize = self._tokenizer is not None and sampling_params.detokenize
        group = _Group(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            sampling_params=sampling_params,
            completions=[],
            arrival_s=arrival_s,
            final_only=final_only,
            deltas=deltas,
            encoder_prompt=encoder_prompt,
            encoder_prompt_token_ids=None if encoder is None else list(encoder.token_ids),
        )
        for index, child_id in enumerate(child_ids):
            detokenizer = None
            if detokenize:
                assert self._tokenizer is not None
                detokenizer = Detokenizer(self._tokenizer, sampling_params, prompt_token_ids)
                detokenizer.push(output_token_ids)
            wants_logprobs = sampling_params.logprobs is not None
            group.completions.append(
                _Completion(
                    output=CompletionOutput(index=index, text="", token_ids=[]),
                    detokenizer=detokenizer,
                    logprobs=[] if wants_logprobs else None,
                )
            )
            self._groups[child_id] = (group, index)

    def scheduled(self, child_id: str, now_s: float) -> None:
        """Note when a request first had a place in a step."""
        group = self._groups.get(child_id)
        if group is not None and group[0].scheduled_s is None:
            group[0].scheduled_s = now_s

    def process(self, deltas: Sequence[Delta], now_s: float) -> Processed:
        """Apply one step's deltas. Each request that changed gives one output with all that it has so far."""
        changed: dict[str, _Group] = {}
        stopped: list[Stopped] = []
        for delta in deltas:
            entry = self._groups.get(delta.request_id)
            if entry is None:
                continue
            group, index = entry
            stop = self._apply(group, group.completions[index], delta, now_s)
            if stop is not None:
                stopped.append(Stopped(child_id=delta.request_id, stop_reason=stop))
            if group.completions[index].output.finish_reason is not None:
                del self._groups[delta.request_id]
                if all(completion.output.finished for completion in group.completions):
                    group.finished_s = now_s
            if not group.final_only or group.finished_s is not None:
                changed[group.request_id] = group
        return Processed(outputs=[self._snapshot(group) for group in changed.values()], stopped=stopped)

    def abort(self, child_id: str) -> None:
        """Forget a completion."""
        self._groups.pop(child_id, None)

    def _apply(self, group: _Group, completion: _Completion, delta: Delta, now_s: float) -> str | None:
        group.num_cached_tokens = max(group.num_cached_tokens, delta.num_cached_tokens)
        if delta.error:
            group.error, group.is_own_error = delta.error, delta.is_own_error
        if delta.pooled is not None:
            group.pooled = delta.pooled
        for entry in delta.prompt_logprobs:
            group.prompt_logprobs[entry.position] = self._logprob_entry(entry)
        if delta.token_ids and group.first_token_s is None:
            group.first_token_s = now_s
        output = completion.output
        finish_reason: FinishReason | None = delta.finish_reason
        stop_reason = delta.stop_reason
        stopped: str | None = None
        for position, token in enumerate(delta.token_ids):
            output.token_ids.append(token)
            if completion.logprobs is not None and position < len(delta.logprobs):
                entry = delta.logprobs[position]
                completion.logprobs.append(self._logprob_entry(entry))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprobs[0]
            if completion.detokenizer is None:
                continue
            is_last = position == len(delta.token_ids) - 1
            if is_last and finish_reason == "stop" and not group.sampling_params.include_stop_str_in_output:
                continue
            piece = completion.detokenizer.push((token,))
            completion.pieces.append(piece.text)
            if piece.stop_reason is not None:
                if finish_reason is None:
                    stopped = piece.stop_reason
                finish_reason, stop_reason = "stop", piece.stop_reason
                break
        if finish_reason is not None:
            if completion.detokenizer is not None and not isinstance(stop_reason, str):
                completion.pieces.append(completion.detokenizer.finish())
            output.finish_reason, output.stop_reason = finish_reason, stop_reason
        return stopped

    def _snapshot(self, group: _Group) -> RequestOutput:
        outputs = []
        for completion in group.completions:
            own = completion.output
            if len(completion.pieces) > 1:
                completion.pieces[:] = ["".join(completion.pieces)]
            outputs.append(
                CompletionOutput(
                    index=own.index,
                    text=completion.pieces[0] if completion.pieces else "",
                    token_ids=list(own.token_ids),
                    cumulative_logprob=own.cumulative_logprob,
                    logprobs=None if completion.logprobs is None else list(completion.logprobs),
                    finish_reason=own.finish_reason,
                    stop_reason=own.stop_reason,
                )
            )
            if group.deltas:
                completion.pieces.clear()
                own.token_ids.clear()
                if completion.logprobs is not None:
                    completion.logprobs.clear()
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=outputs,
            finished=group.finished_s is not None,
            prompt_logprobs=self._prompt_logprobs(group) if self._gives_prompt_logprobs(group) else None,
            num_cached_tokens=group.num_cached_tokens,
            timings=RequestTimings(
                arrival_s=group.arrival_s,
                scheduled_s=group.scheduled_s,
                first_token_s=group.first_token_s,
                finished_s=group.finished_s,
            ),
            pooled=group.pooled,
            error=group.error,
            is_own_error=group.is_own_error,
            encoder_prompt=group.encoder_prompt,
            encoder_prompt_token_ids=group.encoder_prompt_token_ids,
        )

    def _gives_prompt_logprobs(self, group: _Group) -> bool:
        """Deltas bring them once, with the first token."""
        if not group.deltas:
            return True
        is_first = not group.gave_prompt and (group.first_token_s is not None or group.finished_s is not None)
        group.gave_prompt = group.gave_prompt or is_first
        return is_first

    def _prompt_logprobs(self, group: _Group) -> list[dict[int, Logprob] | None] | None:
        if group.sampling_params.prompt_logprobs is None:
            return None
        return [group.prompt_logprobs.get(position) for position in range(len(group.prompt_token_ids))]

    def _logprob_entry(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        for token, value, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            if token in found:
                continue
            text, raw = "", b""
            if self._tokenizer is not None:
                raw = self._tokenizer.token_bytes(token)
                text = raw.decode("utf-8", errors="replace")
            found[token] = Logprob(logprob=value, rank=rank, decoded_token=text, bytes=tuple(raw))
        return found
