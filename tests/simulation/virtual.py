"""An event loop in virtual time: a wait costs nothing, and what would go to a thread is done at once, so that a seed is a life.

Time stands still while code runs and jumps to the next timer when nothing is left to run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
# Any time of day.
EPOCH_S = 1_000_000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self._jump))

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _jump(self, seconds: float) -> None:
        self._now_s += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to happen"
        if timeout > 0:
            self._jump(timeout)
        return super().select(0)


def unix_s() -> float:
    """The time of day in the virtual loop that runs."""
    return EPOCH_S + asyncio.get_running_loop().time()


def live(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs it in a virtual loop of its own. An exception that nobody would hear of, in a task or a callback, is raised here.

    A call that a process has left without an answer when it died ends with the life.
    """
    unheard: list[Mapping[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        with patch("time.monotonic", loop.time):
            answer = runner.run(main())
    for context in unheard:
        if context["message"] == "Task was destroyed but it is pending!":
            continue
        raise AssertionError(context["message"]) from context.get("exception")
    return answer
