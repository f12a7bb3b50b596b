"""One request as the scheduler sees it, and what its parameters mean for when it ends."""

from collections.abc import Sequence

import xxhash

from ..kv.block_manager import RequestBlocks
from ..stages import EngineRequest, FinishReason

FINISHED = -1
"""Epoch of a finished request: no row has it."""


class Request:
    """Owned by the scheduler alone.

    Positions [0, num_computed_tokens) have KV that is written or scheduled; with drafts in flight that is an upper
    bound. num_pending_tokens: tokens that steps in flight sample, at most. A request waits (slot -1, no blocks) or
    runs (a slot and blocks). is_encoding: the step that admitted it runs the encoder for it, and it has no later row.
    whole: ranges of positions that must be computed in one step. images_end: behind the last row of its images.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "blocks",
        "epoch",
        "images_end",
        "is_encoding",
        "is_prompt_only",
        "last_step",
        "max_company",
        "max_num_tokens",
        "min_num_tokens",
        "needs_last_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_pending_tokens",
        "num_prompt_tokens",
        "place",
        "priority",
        "request_id",
        "seed",
        "slot",
        "source",
        "stop_ids",
        "suspect_until",
        "token_ids",
        "whole",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        arrival: int,
        seed: int,
        blocks: RequestBlocks,
        max_model_len: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """arrival: its number among all requests. seed: of the deployment, for a request that brings none."""
        params = source.sampling_params
        self.source = source
        self.request_id = source.request_id
        self.priority = source.priority
        self.arrival = arrival
        self.arrival_s = source.arrival_s
        self.place: tuple[int, ...] = ()
        self.seed = resolve_seed(params.seed, seed, source.request_id)
        self.blocks = blocks

        self.token_ids = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        # A grammar says itself where its text may end, and then it must.
        has_grammar = params.structured_output is not None
        self.min_num_tokens = self.num_prompt_tokens + (0 if has_grammar else params.min_tokens)
        self.token_ids += source.output_token_ids
        self.is_prompt_only = params.max_tokens == 0
        eos = () if params.ignore_eos and not has_grammar else tuple(eos_token_ids)
        # To the stop reason: an end of sequence needs none.
        self.stop_ids: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        self.stop_ids.update(dict.fromkeys(eos))
        # Its next row is built from the last token on the host, so that it cannot run ahead.
        self.needs_last_token = bool(
            params.stop
            or params.bad_words
            or source.bad_word_ids
            or params.logits_processors
            or has_grammar
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

        self.images_end = max((int(image.places[-1]) + 1 for image in source.images), default=0)
        self.whole: Sequence[tuple[int, int]] = ()
        if source.whole_images:
            self.whole = [(int(image.places[0]), int(image.places[-1]) + 1) for image in source.images]

        self.epoch = 0
        self.is_encoding = False
        self.slot = -1
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_drafts: int | None = None  # for its next row; None: as many as there may be
        self.last_step = 0
        self.num_cached_tokens = -1  # -1: never admitted
        self.max_company = 0
        self.suspect_until = 0

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; the reason if it is the last one.

        A stop before min_tokens does not count: the sampler bans it, so this only guards against a sampler that
        does not.
        """
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if token_id in self.stop_ids and num_tokens >= self.min_num_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_num_tokens else None

    def first_image(self, position: int) -> int:
        """The first image that a token at `position` or behind it needs."""
        return sum(int(image.places[-1]) < position for image in self.source.images)

    @property
    def num_patches_to_encode(self) -> int:
        """Patches that the encoder reads for it in the step that admits it."""
        table = self.blocks.images
        if table is None:
            return 0
        pairs = zip(self.source.images, table.must_write, strict=True)
        return sum(len(image.patches) for image, must_write in pairs if must_write)

    def cut(self, start: int, num_tokens: int) -> int:
        """At most `num_tokens`, so that no step ends within a range that must be computed in one; maybe 0."""
        end = start + num_tokens
        for first, behind in self.whole:
            if first < end < behind:
                return max(0, first - start)
        return num_tokens


def resolve_seed(seed: int | None, deployment_seed: int, request_id: str) -> int:
    """The 32-bit seed that keys a request's noise.

    A user's seed (64 bits, signed or not) is mixed by splitmix64 and folded, so that near seeds give unrelated
    noise; two seeds share noise with a chance of 2^-32. Without one, a hash of the deployment's seed and the
    request id takes its place: the same after a crash.
    """
    if seed is None:
        # Not xxh3's own seed: with few bytes of data it gives equal hashes for many pairs of seed and data.
        data = (deployment_seed % 2**64).to_bytes(8, "little") + request_id.encode("utf-8", "surrogatepass")
        seed = xxhash.xxh3_64_intdigest(data)
    value = (seed + 0x9E3779B97F4A7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    value ^= value >> 31
    return (value ^ (value >> 32)) & 0xFFFFFFFF
