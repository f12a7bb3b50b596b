"""The engine's side of the page's pictures: which request computed what in a step, and who holds which KV block."""

import math
import time
from collections.abc import Iterable, Sequence

from ..engine.engine import Engine
from ..stages import Plan
from .frames import KVGroupTrace, StepTrace, TraceRow

_INTERVAL_S = 0.25
"""Between two pictures of the blocks, at least."""
_SHARE = 0.02
"""Of the engine's time that pictures of the blocks may take: a large pool is drawn less often."""


class StepTracer:
    """Describes steps while somebody watches. Made when the first listener comes, dropped when the last one leaves.

    A request that was admitted before that is told by the size of its rows: more than one token is prefill.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_step = -1
        self._prefill_until: dict[str, float] = {}
        self._kv_due_s = 0.0

    def trace(self, seconds: float) -> StepTrace | None:
        """The newest step, which took so long, and the KV blocks if their time has come. None: nothing is new."""
        plan = self._engine.last_plan
        kv = self._kv() if time.monotonic() >= self._kv_due_s or not self._engine.has_unfinished() else None
        if plan is None or plan.step == self._last_step:
            return None if kv is None else StepTrace(step=-1, seconds=0.0, rows=[], kv=kv)
        self._last_step = plan.step
        return StepTrace(step=plan.step, seconds=seconds, rows=self._rows(plan), kv=kv)

    def _rows(self, plan: Plan) -> list[TraceRow]:
        for new in plan.new:
            # A preempted request comes back with its output as well, which it computes again.
            self._prefill_until[new.request_id] = len(new.token_ids)
        rows = []
        for row in plan.rows:
            until = self._prefill_until.get(
                row.request_id, 0 if row.num_tokens - row.num_draft_tokens <= 1 else math.inf
            )
            is_prefill = row.start is not None and row.start < until
            rows.append(TraceRow(request_id=row.request_id, num_tokens=row.num_tokens, is_prefill=is_prefill))
        if len(self._prefill_until) > 4 * len(rows) + 64:
            running = {row.request_id for row in rows}
            self._prefill_until = {name: until for name, until in self._prefill_until.items() if name in running}
        return rows

    def _kv(self) -> list[KVGroupTrace]:
        started_s = time.monotonic()
        scheduler = self._engine.scheduler
        tables = scheduler.block_tables()
        groups = [
            KVGroupTrace(
                num_blocks=pool.num_blocks - 1,
                held={request_id: _runs(sorted(filter(None, table[index]))) for request_id, table in tables.items()},
                cached=_runs(sorted(pool.cached_ids())),
            )
            for index, pool in enumerate(scheduler.block_manager.pools)
        ]
        now_s = time.monotonic()
        self._kv_due_s = now_s + max(_INTERVAL_S, (now_s - started_s) / _SHARE)
        return groups


def _runs(ids: Sequence[int] | Iterable[int]) -> list[int]:
    """Sorted ids as first, count, first, count, ..."""
    runs: list[int] = []
    end = -1
    for block_id in ids:
        if block_id == end:
            runs[-1] += 1
        else:
            runs += (block_id, 1)
        end = block_id + 1
    return runs
