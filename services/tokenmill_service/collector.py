"""What Python's garbage collector may look at, and when: a full collection in the middle of a step holds it up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Young objects to gather before the collector looks at them, and how much rarer it looks at older ones.
_THRESHOLDS = (50_000, 20, 100)


def keep_collector_off_the_hot_path() -> None:
    """What start-up made is never looked at again, and the collector runs rarely: steps make little garbage that has cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def collector_paused() -> Iterator[None]:
    """For loading a model, a sixth of whose time goes to looking at new objects that are to stay.

    They are not looked at later either: a full collection over all of torch's would hold up a step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
