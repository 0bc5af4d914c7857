"""Three times more work than the services can do: the urgent is served in time, the rest waits or is told when to come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from tokenmill_client import Lane, RequestInfo

from benchmarks.overload import PROMPT, Load, overload
from tests.fakes.calls import foretold
from tests.fakes.processes import Processes

RECOVERY_S = 1.0


async def test_urgent_requests_keep_their_target_nothing_accepted_is_lost_and_all_returns_to_normal(processes: Processes) -> None:
    load = Load(seconds=8)
    marks = ("--ttft-target", "2", "--overload-queue-delay", "1")
    run = await overload(load, processes, *marks, "--overload-hold", "0.5", "--overload-recovery", f"{RECOVERY_S}")

    accepted, arrived = Counter(run.accepted.values()), Counter(load.lanes)
    assert (accepted[Lane.REAL_TIME], accepted[Lane.BATCH]) == (arrived[Lane.REAL_TIME], arrived[Lane.BATCH])
    assert len(run.refused) + accepted[Lane.STANDARD] == arrived[Lane.STANDARD]
    assert len(run.refused) > load.capacity, "the standard lane was taken all the time"
    assert all(lane is Lane.STANDARD and delay_s is not None and delay_s >= RECOVERY_S for lane, delay_s in run.refused)

    assert len(run.outputs) == len(run.accepted)
    expected = foretold(PROMPT, load.tokens)
    assert all(list(output.token_ids) == expected for output in run.outputs.values()), "an accepted request was cut short"

    assert len(run.ttft_s) == arrived[Lane.REAL_TIME]
    # Not in seconds, which are a busy machine's: how many others come to their first token while one waits for its own.
    waits = {lane: begun_meanwhile(run.ended.values(), lane) for lane in (Lane.REAL_TIME, Lane.STANDARD)}
    assert at_percent(waits[Lane.REAL_TIME], 95) < at_percent(waits[Lane.STANDARD], 50) / 2

    assert max(run.stages) == 3
    assert run.stages[-1] == 0
    # By a stage at a time, however late a look came.
    moves = zip(pairwise(run.stages), pairwise(run.changes), strict=True)
    assert all(abs(after - before) <= changes - changes_before for (before, after), (changes_before, changes) in moves)


def begun_meanwhile(infos: Collection[RequestInfo], lane: Lane) -> list[int]:
    """For each request of the lane, in growing order."""
    first = [info.first_token_at for info in infos if info.first_token_at is not None]
    waited = [(info.submitted_at, info.first_token_at) for info in infos if info.lane is lane]
    return sorted(sum(since < at < until for at in first) for since, until in waited if since is not None and until is not None)


def at_percent(values: list[int], percent: int) -> int:
    return values[len(values) * percent // 100]
