"""Steps computed in one call of the runner, or, when that raises, one step in parts that tell sequences at fault from the others.

Must not know: blocks, plans, what a pass does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import structlog

from tokenmill_executor.batch import Advance
from tokenmill_executor.runner import DeviceLost, SampledLogprobs, StepOutput

log = structlog.get_logger(__name__)

_DETAIL_CHARS = 500


@dataclass(slots=True)
class Sampled:
    """What the steps of a part have sampled for one sequence, in their order, and why the one after these could not."""

    token_ids: SequenceOf[int]
    logprobs: SequenceOf[SampledLogprobs] = ()
    error: str = ""


@dataclass(slots=True)
class Part:
    """Some sequences, computed together: the runner's output of each step, or why the only one of them failed."""

    advances: SequenceOf[Advance]
    sample_rows: SequenceOf[int] = ()
    outputs: SequenceOf[StepOutput] = ()
    error: str = ""

    def tokens_by_sample(self) -> list[Sampled]:
        sampled = [Sampled(token_ids) for token_ids in zip(*(output.token_ids for output in self.outputs), strict=True)]
        for step in range(len(self.outputs) - 1, -1, -1):
            for sample, error in self.outputs[step].errors.items():
                sampled[sample].token_ids, sampled[sample].error = sampled[sample].token_ids[:step], error
        for output in self.outputs:
            for sample, logprobs in output.logprobs.items():
                sampled[sample].logprobs = [*sampled[sample].logprobs, logprobs]
        return sampled


# With the most steps that may be taken.
Compute = Callable[[SequenceOf[Advance], int], Part]


def compute_in_parts(compute: Compute, advances: SequenceOf[Advance], most: int) -> list[Part]:
    """One call; if it raises, further ones of a step each. Raises DeviceLost alone, after which no call is of use."""
    if not advances:
        return []
    try:
        return [compute(advances, most)]
    except DeviceLost:
        raise
    except Exception as error:
        log.warning("step failed", num_seqs=len(advances), most_steps=most, exc_info=error)
        return _search(compute, advances, error) if most == 1 else compute_in_parts(compute, advances, 1)


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
            parts.append(compute(half, 1))
        except DeviceLost:
            raise
        except Exception as half_error:
            parts += _search(compute, half, half_error)
    return parts
