"""Who comes back after the engine died, and when: in halves, so that a request that kills engines ends up alone."""

from collections.abc import Sequence

from .generation import Completion

_MARGIN_TOKENS = 3
"""Tokens behind the last known one at which a step that crashed can have been: those of steps in flight."""


class Quarantine:
    """Owns the groups that wait to come back. All that were in an engine that died are suspects; if some were being
    tried when it died, those are tried further, and the others wait until that is done.

    A group comes back when all of the group before it got past the place where the engine died. One that dies
    alone after it came back alone is at fault. Invariant: a completion is in at most one group.
    """

    def __init__(self) -> None:
        self._groups: list[list[Completion]] = []
        self._current: dict[Completion, None] = {}

    @property
    def is_active(self) -> bool:
        """True while suspects are being tried; nothing new should start."""
        return bool(self._groups or self._current)

    def crashed(self, in_engine: Sequence[Completion]) -> Completion | None:
        """Make suspects of all that were in the engine; the one at fault, if that is known now."""
        tried = [completion for completion in in_engine if completion in self._current]
        others = [completion for completion in in_engine if completion not in self._current] if tried else []
        self._current.clear()
        if len(in_engine) == 1 and in_engine[0].company == 1:
            return in_engine[0]
        for completion in in_engine:
            completion.suspect_until = len(completion.output_token_ids) + _MARGIN_TOKENS
        suspects = tried or list(in_engine)
        half = -(-len(suspects) // 2)
        self._groups[:0] = [part for part in (suspects[:half], suspects[half:], others) if part]
        return None

    def next_group(self, num_in_engine: int) -> list[Completion]:
        """Those that may come back now: the next group if no suspect runs, else nobody."""
        while not self._current and self._groups:
            group = [completion for completion in self._groups.pop(0) if not completion.is_finished]
            for completion in group:
                completion.company = num_in_engine + len(group)
            self._current.update(dict.fromkeys(group))
        return list(self._current) if all(not c.is_sent for c in self._current) else []

    def progressed(self, completion: Completion) -> bool:
        """Tell that a completion has more tokens or ended; True if with it the last suspect is cleared."""
        if completion not in self._current:
            return False
        if completion.is_finished or len(completion.output_token_ids) >= completion.suspect_until:
            completion.company, completion.suspect_until = 0, -1
            del self._current[completion]
            return not self._current
        return False
