"""What each tenant has taken: the running counts against a count of the live requests, through random lives."""

from __future__ import annotations

import asyncio
import random

import pytest
from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.backlog import QueueLimits, most_tokens
from tokenmill_scheduler.core.request import QUEUED, TERMINAL
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk.errors import TenantLimit
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.tenants import TenantLimits, Usage

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, request, settle

TENANTS = ("apple", "banana", "cherry")


def counted(shell: Shell, names: list[str], tenant: str) -> Usage:
    usage = Usage()
    for name in names:
        live = shell.loop.live.get(name)
        if live is not None and live.request.tenant == tenant and live.state not in TERMINAL:
            usage.requests += 1
            usage.queued_tokens += most_tokens(live.request) if live.state in QUEUED else 0
    return usage


@pytest.mark.parametrize("seed", range(10))
async def test_counts_follow_every_move(seed: int) -> None:
    rng = random.Random(seed)
    ledger = MemoryLedger()
    shell = Shell.over(ledger, config=SchedulerConfig(max_num_seqs=2))
    await shell.join()
    names: list[str] = []
    for turn in range(60):
        match rng.randrange(5):
            case 0 | 1:
                names.append(f"r{turn}")
                await shell.submit(request(names[-1], rng.randrange(9), rng.randrange(1, 5), tenant=rng.choice(TENANTS)))
            case 2 if shell.executor.unanswered:
                await shell.step()
            case 3 if names and shell.loop.live.get(name := rng.choice(names)) is not None:
                await shell.desk.cancel(name, "")
            case 4 if turn % 3 == 0:
                # All running ones are preempted and come again.
                shell.loop.lost(shell.loop.drives["played"], "gone")
                await shell.join(epoch=turn + 2)
        for tenant in TENANTS:
            assert shell.loop.live.tenants.of(tenant) == counted(shell, names, tenant)
    restarted = Shell.over(ledger)
    take_up(restarted.loop, tuple(ledger.unfinished()))
    for tenant in TENANTS:
        assert restarted.loop.live.tenants.of(tenant) == counted(restarted, names, tenant)
        assert restarted.loop.live.tenants.of(tenant).requests == counted(shell, names, tenant).requests
    await shell.run_out()
    assert len(shell.loop.live.tenants) == 0


def limited(shell: Shell, limits: TenantLimits) -> LoopDesk:
    return LoopDesk(QueueLimits(100), shell.loop, None, shell.ledger, shell.writer, lambda tenant: limits)  # type: ignore[arg-type]  # no model is asked for


async def test_what_is_on_its_way_to_disk_counts() -> None:
    shell = Shell.over(MemoryLedger())
    desk = limited(shell, TenantLimits(max_requests=1))
    shell.writer.hold = True
    first = asyncio.create_task(desk.submit(request("a", tenant="t"), b"d"))
    await settle()
    with pytest.raises(TenantLimit, match="tenant t has 1 requests"):
        await desk.submit(request("b", tenant="t"), b"d")
    # The same one again waits for the first; another tenant's is its own matter.
    again = asyncio.create_task(desk.submit(request("a", tenant="t"), b"d"))
    other = asyncio.create_task(desk.submit(request("c", tenant="u"), b"d"))
    await settle()
    shell.writer.commit()
    assert [(await task).joined for task in (first, again, other)] == [False, True, False]
    assert shell.loop.live.tenants.of("t") == Usage(1, 7)
    assert shell.ledger.find("b") is None


async def test_what_could_not_be_written_counts_no_longer() -> None:
    shell = Shell.over(MemoryLedger())
    desk = limited(shell, TenantLimits(max_requests=1))
    write = shell.writer.submit

    async def away(submission: object) -> object:
        raise LedgerUnavailable

    shell.writer.submit = away  # type: ignore[method-assign,assignment]
    with pytest.raises(Exception, match="the database cannot be written"):
        await desk.submit(request("a", tenant="t"), b"d")
    shell.writer.submit = write  # type: ignore[method-assign]
    assert not (await desk.submit(request("a", tenant="t"), b"d")).joined


async def test_running_requests_are_not_queued_tokens() -> None:
    shell = Shell.over(MemoryLedger())
    await shell.join()
    await shell.submit(request("a", tenant="t", max_tokens=9))
    assert shell.loop.live.tenants.of("t") == Usage(1, 0)
    desk = limited(shell, TenantLimits(max_queued_tokens=12))
    await desk.submit(request("b", tenant="t", max_tokens=9), b"d")
    with pytest.raises(TenantLimit, match="may come to 13 tokens, more than the 12") as hopeless:
        await desk.submit(request("c", tenant="t", max_tokens=10), b"d")
    assert hopeless.value.retry_delay_s is None
    shell.loop.handle(events.Cancelled("a", ""))
    assert shell.loop.live.tenants.of("t").requests == 1
