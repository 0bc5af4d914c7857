"""Two schedulers on one ledger, in one process: an executor changes hands, and what only it can run goes with it."""

from __future__ import annotations

import asyncio

import pytest
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.desk import Chunk, Ended, Unavailable
from tokenmill_scheduler.ledger.port import Lease

from tests.fakes.calls import eventually
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, output_of, read_all, request, settle


def start(ledger: MemoryLedger, name: str) -> tuple[Shell, Lease]:
    shell, lease = Shell.over(ledger), ledger.take_lease(name, 3600)
    shell.writer.lease = lease
    shell.service.open(lease)
    return shell, lease


async def obey(shell: Shell, lease: Lease) -> None:
    """As `Relay.listen` does."""
    received = shell.ledger.received(lease)
    await shell.service.obey([command for _, command in received])
    shell.ledger.settle([number for number, _ in received])
    await settle()


async def lose(shell: Shell) -> None:
    """To another scheduler, in mid-step."""
    shell.executor.unanswered.clear()
    shell.loop.lost(shell.loop.drives["played"], "another scheduler took it", lives=True)
    await settle()


async def test_what_only_an_executor_given_away_can_run_goes_on_at_its_new_driver() -> None:
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    await mine.submit(request("a", max_tokens=6, detached=False))
    await mine.submit(request("b", max_tokens=6, n=2, best_of=2))
    reading = await mine.service.attach("a", 0)
    for _ in range(3):
        await mine.step()
    await lose(mine)
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    mine.service.handovers.give("played")
    await settle()
    assert len(mine.loop.live) == len(mine.loop.live.attended) == 0
    assert mine.loop.load().num_requests_waiting == sum(lane.waiting for lane in mine.loop.load().lanes) == 0
    assert mine.loop.executors() == ()
    with pytest.raises(Unavailable, match="another scheduler has this request now"):
        [item async for item in reading.chunks]
    await reading.chunks.aclose()
    await other.join(epoch=2)
    await obey(other, lease)
    await obey(other, lease)
    attachments = [await other.service.attach(name, 1) for name in ("a", "b", "b/1")]
    outputs = [asyncio.create_task(read_all(attachment)) for attachment in attachments]
    await other.run_out()
    for output in outputs:
        tokens, ended = await output
        assert len(tokens) == 6
        assert ended == Ended(State.DONE, FinishReason.LENGTH, 6)
    assert ledger.output("a").token_ids == output_of(request("a", max_tokens=6))
    moves = [move.after for move in ledger.transitions("a")]
    assert moves == [State.WAITING, State.PREFILL, State.DECODE, State.PREEMPTED, State.PREFILL, State.DECODE, State.DONE]


async def test_where_nobody_drives_the_executor_any_more_its_requests_stay_and_go_on() -> None:
    mine, _ = start(MemoryLedger(), "mine")
    await mine.join()
    await mine.submit(request("a", max_tokens=6))
    await mine.step()
    await lose(mine)
    mine.service.handovers.give("played")

    async def is_back() -> bool:
        return mine.loop.live.runs("a") and mine.loop.why_waits("a") is not None

    await eventually(is_back)
    await mine.join(epoch=2)
    attachment = await mine.service.attach("a", 0)
    await mine.run_out()
    items = [item async for item in attachment.chunks]
    tokens = tuple(token for item in items if isinstance(item, Chunk) for token in item.token_ids)
    assert tokens == output_of(request("a", max_tokens=6))
