"""Too much work: decides, with hysteresis, how much of it is held back, so that the most urgent is still served in time.

    stage 0  normal
    stage 1  the batch lane gets what the others leave, one static batch after another
    stage 2  the batch lane pauses: what runs of it goes on, nothing of it is admitted
    stage 3  the standard lane is refused at submit; real-time requests are still taken

A stage is entered when a signal has been above its high mark for `hold_s`, and left when all that can bring it about have been
below their low marks for `recovery_s`, one stage at a time, each counted from the last change: so it changes at most once in the
shorter of the two. Between the marks nothing changes. What is only foreseen (blocks, tokens against their rate) holds back batch
work; clients are refused for a delay that is really there. Must not know: requests, executors, what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    NORMAL = 0
    BATCH_LEFTOVER = 1
    BATCH_PAUSED = 2
    STANDARD_REFUSED = 3


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """`ttft_target_s` is for the time to first token of real-time requests, `queue_delay_s` for how long standard ones may wait.

    A low mark is `low` of the high one; `kv_pressure` is the high mark for the share of KV blocks that are promised.
    """

    enabled: bool = True
    ttft_target_s: float = 2.0
    queue_delay_s: float = 60.0
    kv_pressure: float = 0.95
    low: float = 0.5
    hold_s: float = 2.0
    recovery_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Signals:
    """Waits are those of the oldest request of a lane; `drain_s` is how long the queue but for the batch lane takes at the rate at
    which tokens have left it of late. `kv_pressure` is 0 while nobody but the batch lane waits: full blocks alone are no harm."""

    real_time_wait_s: float = 0.0
    standard_wait_s: float = 0.0
    drain_s: float = 0.0
    kv_pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """One signal against its marks; it raises the stage up to `most`."""

    name: str
    value: float
    high: float
    low: float
    most: Stage
    unit: str = " s"


class OverloadController:
    """`stage` and `why` are how things stand; `why` is empty in stage 0, and of the last sample that was above a mark."""

    def __init__(self, config: OverloadConfig) -> None:
        self.stage = Stage.NORMAL
        self.why = ""
        self._config = config
        self._high_since_s: float | None = None
        self._low_since_s: float | None = None
        self._changed_s = float("-inf")

    def sample(self, signals: Signals, now_s: float) -> bool:
        """True when the stage has changed."""
        config = self._config
        if not config.enabled:
            return False
        marks = self._marks(signals)
        holding = [mark for mark in marks if mark.value >= mark.high and mark.most >= self.stage]
        raising = [mark for mark in holding if mark.most > self.stage]
        if self.stage and holding:
            self.why = _in_words(holding[0])
        calm = all(mark.value <= mark.low for mark in marks if mark.most >= self.stage)
        self._high_since_s = _since(self._high_since_s, bool(raising), now_s)
        self._low_since_s = _since(self._low_since_s, calm, now_s)
        if raising and self._has_lasted(self._high_since_s, config.hold_s, now_s):
            return self._change(Stage(self.stage + 1), _in_words(raising[0]), now_s)
        if calm and self.stage and self._has_lasted(self._low_since_s, config.recovery_s, now_s):
            after = Stage(self.stage - 1)
            return self._change(after, self.why if after else "", now_s)
        return False

    def _marks(self, signals: Signals) -> tuple[_Mark, ...]:
        config = self._config
        delay_s, low_s = config.queue_delay_s, config.low * config.queue_delay_s
        # Half of the target is left for the prefill.
        urgent_s = config.ttft_target_s / 2
        kv_low = 1 - (1 - config.kv_pressure) / config.low
        return (
            _Mark("the real-time lane waits", signals.real_time_wait_s, urgent_s, config.low * urgent_s, Stage.STANDARD_REFUSED),
            _Mark("the standard lane waits", signals.standard_wait_s, delay_s, low_s, Stage.STANDARD_REFUSED),
            _Mark("the queue takes to drain", signals.drain_s, delay_s, low_s, Stage.BATCH_PAUSED),
            _Mark("share of KV blocks promised", signals.kv_pressure, config.kv_pressure, kv_low, Stage.BATCH_PAUSED, ""),
        )

    def _has_lasted(self, since_s: float | None, least_s: float, now_s: float) -> bool:
        return since_s is not None and now_s - max(since_s, self._changed_s) >= least_s

    def _change(self, stage: Stage, why: str, now_s: float) -> bool:
        self.stage, self.why, self._changed_s = stage, why, now_s
        return True


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _in_words(mark: _Mark) -> str:
    return f"{mark.name} {mark.value:.3g}{mark.unit}, with {mark.high:g}{mark.unit} as its mark"
