"""Does something once the engine has had nothing to do for a while. Must not know: what. Used on the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WhenIdle:
    """`act` is called once nothing has happened for `after_s` seconds, and again only after another `start`.

    `activity` gives a number that grows with whatever happens, or None while something is under way: `start` when that has ended.
    """

    def __init__(self, after_s: float, activity: Callable[[], int | None], act: Callable[[], None]) -> None:
        self._after_s = after_s
        self._activity = activity
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Costs next to nothing while it is started already."""
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._look, self._activity())

    def close(self) -> None:
        """`act` is not called any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before: int | None) -> None:
        self._timer = None
        now = self._activity()
        if now is None:
            return
        if now == before:
            self._act()
        else:
            self.start()
