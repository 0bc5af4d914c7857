"""Who is refused at submit, with which limit named, and when they are to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from structlog.testing import capture_logs
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.comeback import MOST_S, UNKNOWN_S, Comebacks, delay_s
from tokenmill_scheduler.core.drain import Drain
from tokenmill_scheduler.core.events import Cancelled, QuotasChanged
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk.errors import Overloaded, QueueFull, Refused, RequestExists, TenantLimit
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.tenants import TenantLimits

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, request, settle


def _desk(shell: Shell, queue: QueueLimits | None = None, tenant: TenantLimits | None = None) -> LoopDesk:
    limits = tenant or TenantLimits()
    shell.loop.handle(QuotasChanged(limits.quota))
    return LoopDesk(queue or QueueLimits(100), shell.loop, None, shell.ledger, shell.writer, lambda name: limits)  # type: ignore[arg-type]  # no model is asked for


async def _refusal(submit: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as refused:
        await submit
    return refused.value


async def test_c38_queue_tokens_have_a_limit_and_what_can_never_fit_is_told_so() -> None:
    shell = Shell.over(MemoryLedger())
    desk = _desk(shell, QueueLimits(100, max_tokens=20))
    # Three of prompt, four of output each; all five at once, none on disk yet.
    answers = await asyncio.gather(*[desk.submit(request(name), b"d") for name in "abcde"], return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert [(error.limit, error.retry_delay_s) for error in refused] == [("max_queue_tokens", UNKNOWN_S)] * 3
    assert shell.desk.load().queued_tokens == 14
    assert await asyncio.to_thread(shell.ledger.find, "c") is None
    hopeless = await _refusal(desk.submit(request("f", max_tokens=18), b"d"))
    assert (hopeless.limit, hopeless.retry_delay_s) == ("max_queue_tokens", None)


async def test_c38_the_delay_follows_the_rate_at_which_the_queue_empties() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=1))
    desk = _desk(shell, QueueLimits(2))
    await shell.join()
    for number in range(60):
        # Two leave the queue every second.
        shell.clock.now_s += 0.5
        await desk.submit(request(f"r{number}"), b"d")
        await shell.run_out()
    for name in "abc":
        await desk.submit(request(name), b"d")
        await settle()
    first, second = [await _refusal(desk.submit(request(name), b"d")) for name in "xy"]
    assert first.retry_delay_s == pytest.approx(0.5, rel=0.15)
    assert second.retry_delay_s == pytest.approx(1.0, rel=0.15), "what was promised to one is not promised to the next"


async def test_one_that_has_ended_is_joined_though_the_queue_is_full() -> None:
    shell = Shell.over(MemoryLedger())
    desk = _desk(shell, QueueLimits(1))
    await shell.join()
    await desk.submit(request("ended"), b"d")
    await settle()
    await shell.run_out()
    assert shell.loop.live.get("ended") is None
    shell.loop.lost(shell.loop.drives["played"], "gone")
    await desk.submit(request("a"), b"d")
    assert (await desk.submit(request("ended"), b"d")).joined
    with pytest.raises(RequestExists):
        await desk.submit(request("ended"), b"another")
    with pytest.raises(QueueFull):
        await desk.submit(request("new"), b"d")


async def test_over_quota_waits_or_is_refused_as_the_tenant_s_limits_say() -> None:
    for refuses in (False, True):
        shell = Shell.over(MemoryLedger())
        desk = _desk(shell, tenant=TenantLimits(quota=Quota(max_num_seqs=1, refuses=refuses)))
        await shell.join()
        await desk.submit(request("a", tenant="t"), b"d")
        await settle()
        if refuses:
            error = await _refusal(desk.submit(request("b", tenant="t"), b"d"))
            assert (type(error), error.limit, str(error)) == (TenantLimit, "quota", "tenant t has 1 of 1 sequences running")
            assert error.retry_delay_s == UNKNOWN_S
        else:
            await desk.submit(request("b", tenant="t"), b"d")
            await settle()
            status = await desk.status("b")
            # Of another lease's the loop would not know: the fake writes under none.
            assert shell.loop.scheduler.wait_reason(status.stored.request.request_id) == "tenant t has 1 of 1 sequences running"
        await shell.run_out()


async def test_a_tenant_out_of_tokens_is_told_when_it_has_some() -> None:
    shell = Shell.over(MemoryLedger())
    desk = _desk(shell, tenant=TenantLimits(quota=Quota(max_tokens_per_s=2, refuses=True)))
    await shell.join()
    await desk.submit(request("a", tenant="t"), b"d")
    await settle()
    await shell.run_out()
    # 2 in the bucket, 3 of prompt and 4 of output taken: 5 in debt, and one to go on.
    error = await _refusal(desk.submit(request("b", tenant="t"), b"d"))
    assert error.retry_delay_s == pytest.approx(3.0)
    shell.clock.now_s += 3
    await desk.submit(request("b", tenant="t"), b"d")


async def test_what_exceeds_a_quota_by_itself_is_refused_without_a_delay() -> None:
    shell = Shell.over(MemoryLedger())
    desk = _desk(shell, tenant=TenantLimits(quota=Quota(max_kv_blocks=2)))
    await shell.join()
    error = await _refusal(desk.submit(request("a", max_tokens=10), b"d"))
    assert (
        str(error)
        == "the request may come to 3 KV blocks, more than the 2 that tenant default may hold: ask for a lower max_tokens"
    )
    assert error.retry_delay_s is None


async def test_overload_refuses_the_standard_lane_alone_and_takes_it_again() -> None:
    overload = OverloadConfig(queue_delay_s=1.0, hold_s=0.1, recovery_s=0.5)
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=1, overload=overload))
    desk = _desk(shell)
    await shell.join()
    await desk.submit(request("a", max_tokens=400), b"d")
    await desk.submit(request("b"), b"d")
    await settle()
    for _ in range(30):
        shell.clock.now_s += 0.1
        await shell.states_after_tick("")
    load = desk.load()
    assert (load.overload_stage, load.overload_changes) == (3, 3)
    assert load.overload_reason.startswith("the standard lane waits")
    error = await _refusal(desk.submit(request("c"), b"d"))
    assert isinstance(error, Overloaded)
    assert error.retry_delay_s is not None
    assert error.retry_delay_s >= 0.5
    await desk.submit(request("d", lane=Lane.REAL_TIME), b"d")
    await desk.submit(request("e", lane=Lane.BATCH), b"d")
    assert (await desk.submit(request("b"), b"d")).joined
    for name in "abde":
        shell.loop.handle(Cancelled(name, ""))
    with capture_logs() as logs:
        for _ in range(30):
            shell.clock.now_s += 0.1
            await shell.states_after_tick("")
    falls = [(log["stage"], log["reason"]) for log in logs if log["event"] == "overload stage changed"]
    assert falls == [(stage, "the load has fallen") for stage in (2, 1, 0)]
    assert (desk.load().overload_stage, desk.load().overload_reason) == (0, "")
    await desk.submit(request("c"), b"d")


# ---- delays --------------------------------------------------------------------------------------------------------------------


def test_delays_are_bounded() -> None:
    assert delay_s(5, 0.0) == UNKNOWN_S
    assert delay_s(5, 1e-9) == MOST_S
    assert delay_s(1, 1e9) == 0.1
    comebacks, drain = Comebacks(), Drain()
    for second in range(60):
        drain.left(10, float(second))
    delays = [comebacks.next_s(1, 10, (drain.requests, drain.tokens), 60.0) for _ in range(200)]
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(1.0, rel=0.15)
    assert delays[-1] == MOST_S


def test_a_rate_is_right_from_the_start_and_falls_when_nothing_leaves() -> None:
    drain = Drain()
    assert drain.requests.per_s(5.0) == 0.0
    for tenth in range(51):
        drain.left(7, 100 + tenth / 10)
    assert drain.requests.per_s(105.0) == pytest.approx(10, rel=0.1)
    assert drain.tokens.per_s(105.0) == pytest.approx(70, rel=0.1)
    assert drain.requests.per_s(135.0) < 1.0
