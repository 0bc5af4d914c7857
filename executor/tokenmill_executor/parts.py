"""A step computed in one pass of the runner, or, when that raises, in parts that tell the sequences at fault from the others.

Must not know: blocks, plans, what a pass does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import structlog

from tokenmill_executor.batch import Advance
from tokenmill_executor.runner import DeviceLost, StepOutput

log = structlog.get_logger(__name__)

_DETAIL_CHARS = 500


@dataclass(slots=True)
class Part:
    """Some of a step's sequences, computed together: the output of the runner, or why the only one of them failed."""

    advances: SequenceOf[Advance]
    sample_rows: SequenceOf[int] = ()
    output: StepOutput = field(default_factory=lambda: StepOutput([]))
    error: str = ""


Compute = Callable[[SequenceOf[Advance]], Part]


def compute_in_parts(compute: Compute, advances: SequenceOf[Advance]) -> list[Part]:
    """One pass; if it raises, further ones. Raises DeviceLost alone, after which no pass is of use."""
    if not advances:
        return []
    try:
        return [compute(advances)]
    except DeviceLost:
        raise
    except Exception as error:
        log.warning("step failed", num_seqs=len(advances), exc_info=error)
        return _search(compute, advances, error)


def _search(compute: Compute, advances: SequenceOf[Advance], error: Exception) -> list[Part]:
    """`advances` raised `error` together: tries each half alone, down to single sequences.

    So one bad sequence among S costs about 2 log2 S further passes, and the worst case 2 S - 2.
    """
    if len(advances) == 1:
        return [Part(advances, error=f"{type(error).__name__}: {error}"[:_DETAIL_CHARS])]
    middle = len(advances) // 2
    parts: list[Part] = []
    for half in (advances[:middle], advances[middle:]):
        try:
            parts.append(compute(half))
        except DeviceLost:
            raise
        except Exception as half_error:
            parts += _search(compute, half, half_error)
    return parts
