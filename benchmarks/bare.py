"""An engine driven by the shortest loop that batches as the scheduler does: what a service around it is measured against."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill_executor.engine import Engine
from tokenmill_executor.loading import Loader
from tokenmill_executor.records import Admission, Plan, Result, SequenceFinish
from tokenmill_executor.runner import SamplingParams
from tokenmill_executor.settings import parse_settings

TOKEN_BUDGET = 512
# Of a plan that only decodes; as good as any larger number.
MOST_STEPS = 16


def load_engine(flags: Sequence[str], environ: Mapping[str, str] = os.environ) -> Engine:
    """Of an executor with these flags that has been idle for a while: no step waits for memory that is new to the process."""
    engine = Loader(parse_settings(flags, environ)).load()
    while engine.populate_some():
        pass
    return engine


@dataclass(frozen=True)
class Job:
    prompt: Sequence[int]
    max_tokens: int
    seed: int


class BareLoop:
    """One plan after the other, where blocks are plenty: of one step, or of as many decodes as end no job.

    A job's number is its sequence id.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], slots: int) -> None:
        self._engine = engine
        self._slots = slots
        self._waiting = deque(enumerate(jobs))
        # Of each running sequence, the prompt tokens that are neither computed nor cached.
        self._left: dict[int, int] = {}
        self._outputs: list[list[int]] = [[] for _ in jobs]
        self._max_tokens = [job.max_tokens for job in jobs]
        self._plans = 0
        self._steps = 0

    def run(self) -> list[list[int]]:
        """The output of each job. Raises RuntimeError for one that the engine cannot run."""
        while self._waiting or self._left:
            self._take(self._engine.carry_out(self._plan()))
        return self._outputs

    @property
    def steps(self) -> int:
        return self._steps

    def _plan(self) -> Plan:
        admissions: list[Admission] = []
        # Those that decode come first; what is left of the budget goes to prompts, in order.
        budget = TOKEN_BUDGET - sum(left == 0 for left in self._left.values())
        while self._waiting and len(self._left) < self._slots and budget > sum(self._left.values()):
            number, job = self._waiting.popleft()
            sampling = SamplingParams(max_tokens=job.max_tokens, seed=job.seed, temperature=0.0, ignore_eos=True)
            admissions.append(Admission(number, job.prompt, len(job.prompt), sampling))
            self._left[number] = len(job.prompt)
        most: dict[int, int] = {}
        for number, left in self._left.items():
            chunk = min(left, budget) if left else 1
            budget -= chunk if left else 0
            if chunk:
                most[number] = chunk
        steps = 1
        if not any(self._left.values()):
            steps = min(MOST_STEPS, *(self._max_tokens[number] - len(self._outputs[number]) for number in most))
            most = dict.fromkeys(most, steps)
        self._plans += 1
        return Plan(1, self._plans, (), admissions, tuple(most), tuple(most.values()), steps)

    def _take(self, result: Result) -> None:
        if result.faults:
            raise RuntimeError(f"the engine cannot run sequence {result.faults[0].sequence_id}: {result.faults[0].detail}")
        self._steps += result.num_steps
        tokens = iter(result.token_ids)
        cached = result.num_cached or [0] * len(result.sequence_ids)
        for row, number in enumerate(result.sequence_ids):
            self._left[number] = max(0, self._left[number] - result.num_computed[row] - cached[row])
            self._outputs[number] += [next(tokens) for _ in range(result.num_sampled[row])]
            if result.finishes[row] != SequenceFinish.NONE:
                del self._left[number]
