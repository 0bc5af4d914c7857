"""For how many tokens a request has blocks booked when it is admitted: what it has, what it will probably need, or all it may need.

    optimistic       all it has and one more; it grows block by block, and where blocks run short a victim is preempted
    expected-length  and what outputs of its tenant have turned out to need; the few that need more grow as above
    never-evict      up to its very last token: it is never preempted for blocks, and blocks that it does not use lie idle

Whatever is booked comes off the forecast at once, so the forecast stays as honest in each. Must not know: executors, the pool.
"""

from __future__ import annotations

from typing import Protocol

from tokenmill_scheduler.core.lengths import OutputLengths
from tokenmill_scheduler.core.live import LiveRequest

# Those that need more than half of all outputs did take what the other half leaves.
EXPECTED_SHARE = 0.5


class AdmissionMode(Protocol):
    name: str
    # Whether sequences grow beyond what was booked for them, so that some blocks are to be kept back for that.
    grows: bool

    def tokens(self, live: LiveRequest, last_computed: int) -> int:
        """Tokens to book blocks for, of at most `last_computed` that will ever be computed."""


class Optimistic:
    """As vLLM does: what is not needed now may be used by others until it is."""

    name = "optimistic"
    grows = True

    def tokens(self, live: LiveRequest, last_computed: int) -> int:
        return min(live.known + 1, last_computed)


class NeverEvict:
    """Prompt and max_tokens, as Orca (OSDI 2022) and FasterTransformer do."""

    name = "never-evict"
    grows = False

    def tokens(self, live: LiveRequest, last_computed: int) -> int:
        return last_computed


class ExpectedLength:
    """By observed outputs; without any, as never-evict. One that is longer already than expected is admitted optimistically."""

    name = "expected-length"
    grows = True

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths

    def tokens(self, live: LiveRequest, last_computed: int) -> int:
        request = live.request
        expected = self._lengths.expected(request.tenant, request.model, EXPECTED_SHARE)
        if expected is None:
            return last_computed
        return min(max(live.known + 1, len(request.prompt) + expected), last_computed)


ADMISSION_MODES = (Optimistic.name, NeverEvict.name, ExpectedLength.name)


def admission_named(name: str, lengths: OutputLengths) -> AdmissionMode:
    """Raises KeyError when there is no such mode."""
    modes: dict[str, AdmissionMode] = {mode.name: mode for mode in (Optimistic(), NeverEvict(), ExpectedLength(lengths))}
    return modes[name]
