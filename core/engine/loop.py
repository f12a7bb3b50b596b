"""One step after another: schedule, submit, commit, with as many steps in flight as the device allows."""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from ..errors import DeviceLost, HeadraceError
from ..scheduler.scheduler import Scheduler
from ..stages import Delta, Plan, StepResult
from .executor import Executor, StepFuture

logger = logging.getLogger(__name__)


class StepLoop:
    """Owns the steps in flight, at most depth + 1, which are committed in the order of submission.

    An error of headrace's own fails the step and the scheduler decides who is tried again; a lost device is
    restarted besides. Any other exception (a bug, Ctrl-C) passes through; the step it hit counts as failed, so that
    whoever goes on stepping loses nothing.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int = 0) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._in_flight: deque[tuple[Plan, StepFuture]] = deque()
        self._newly_scheduled: Sequence[str] = ()
        self.last_plan: Plan | None = None
        """of the step that was committed last"""

    def step(self) -> list[Delta]:
        """Submit the next step if there is one, commit the oldest if the device is full or idle otherwise.

        Returns what changed, which may be nothing while steps are in flight or nothing is to be done. Raises
        what `Executor.restart` raises.
        """
        self._newly_scheduled = ()
        if len(self._in_flight) > self._depth:  # an exception left it there
            return self._commit_oldest()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._newly_scheduled = [new.request_id for new in plan.new]
            self._submit(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            return self._commit_oldest()
        return self._scheduler.take_deltas()

    def newly_scheduled(self) -> Sequence[str]:
        """Ids of the requests that the latest step admitted."""
        return self._newly_scheduled

    def _submit(self, plan: Plan) -> None:
        try:
            future = self._executor.submit(plan)
        except HeadraceError as error:
            future = _failed(error)
        except BaseException as error:
            self._in_flight.append((plan, _failed(_interrupted(error))))
            raise
        self._in_flight.append((plan, future))

    def _commit_oldest(self) -> list[Delta]:
        plan, future = self._in_flight[0]
        try:
            result = future.result()
        except DeviceLost as error:
            return self._restart(error)
        except HeadraceError as error:
            result = StepResult(step=plan.step, token_ids=(), error=str(error))
        except BaseException as error:
            self._in_flight[0] = (plan, _failed(_interrupted(error)))
            raise
        self._in_flight.popleft()
        self.last_plan = plan
        return self._scheduler.commit(plan, result)

    def _restart(self, error: DeviceLost) -> list[Delta]:
        logger.warning("device lost, restarting error=%r steps_in_flight=%d", str(error), len(self._in_flight))
        self._in_flight.clear()
        self._scheduler.device_lost(str(error))
        self._executor.restart()
        return self._scheduler.take_deltas()


def _failed(error: HeadraceError) -> "Future[StepResult]":
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future


def _interrupted(error: BaseException) -> HeadraceError:
    return HeadraceError(f"the step was interrupted by {type(error).__name__}: {error}")
