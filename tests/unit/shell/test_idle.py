"""Clients that are connected and read nothing."""

from __future__ import annotations

import asyncio

import pytest
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.live import RequestView
from tokenmill_scheduler.streams import Feed, FeedReader

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, output_of, request, settle

TIMEOUT_S = 10.0


def attended(feed: Feed) -> dict[str, RequestView]:
    return {"a": RequestView(request("a", detached=False), State.DECODE, feed)}


def reader(feed: Feed) -> FeedReader:
    return FeedReader(feed, 0, lambda: None)


async def test_a_client_is_idle_once_it_has_taken_nothing_for_the_timeout() -> None:
    feed = Feed([1, 2])
    client = reader(feed)
    idle = IdleClients(TIMEOUT_S)
    assert idle.find(attended(feed), 100.0) == []
    await anext(client)
    assert idle.find(attended(feed), 109.0) == [], "it has read since"
    assert idle.find(attended(feed), 118.9) == []
    assert idle.find(attended(feed), 119.9) == ["a"]


async def test_a_client_that_waits_for_more_is_not_idle_however_long() -> None:
    feed = Feed()
    reading = asyncio.create_task(anext(reader(feed)))
    await settle()
    idle = IdleClients(TIMEOUT_S)
    assert [idle.find(attended(feed), 100.0 * look) for look in range(1, 5)] == [[]] * 4
    reading.cancel()
    await settle()
    assert feed.waiting == 0


async def test_one_reader_that_reads_is_enough() -> None:
    feed = Feed([1])
    stuck, fine = reader(feed), reader(feed)
    idle = IdleClients(TIMEOUT_S)
    for number in range(2, 6):
        assert idle.find(attended(feed), 10.0 * number) == []
        await anext(fine)
        feed.append([number])
        feed.commit(number)
    await stuck.aclose()


async def test_it_does_not_look_more_often_than_it_has_to_and_never_when_off() -> None:
    feed = Feed([1])
    idle = IdleClients(TIMEOUT_S)
    assert idle.find(attended(feed), 100.0) == []
    assert idle.find({}, 100.5) == [], "too early: what it is shown is not looked at"
    assert idle.find(attended(feed), 110.0) == ["a"]
    off = IdleClients(0.0)
    assert [off.find(attended(feed), at_s) for at_s in (0.0, 1e9)] == [[], []]


@pytest.mark.parametrize("detached", [False, True])
async def test_a_request_whose_client_reads_nothing_expires_with_its_tokens_unless_it_is_detached(detached: bool) -> None:
    shell = Shell.over(MemoryLedger(), idle_client_timeout_s=TIMEOUT_S)
    await shell.join()
    await shell.submit(request("a", max_tokens=1_000, detached=detached))
    attachment = await shell.desk.attach("a", 0)
    await shell.step()
    await shell.step()
    assert State.EXPIRED not in await shell.states_after_tick("a")
    shell.clock.now_s += TIMEOUT_S
    states = await shell.states_after_tick("a")
    assert (states == [State.EXPIRED]) is not detached
    if not detached:
        (*_, end) = shell.ledger.transitions("a")
        assert end.reason == "its client has read nothing for 10 s"
        assert shell.ledger.output("a").token_ids == output_of(request("a", max_tokens=1_000))[:2]
    await attachment.chunks.aclose()
