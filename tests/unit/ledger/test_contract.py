"""What every ledger does: in memory, on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools

import pytest
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import TRANSITIONS, FinishReason, Lane, Request, Sampling, State
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Outcome, Record, RequestQuery, StoredOutput, StoredTransition, Submission

from tests.fakes.ledger_records import decode, done, prefill, run_to_decode, run_to_end, submission, tokens

WRITTEN, JOINED, CONFLICT = Outcome.WRITTEN, Outcome.JOINED, Outcome.CONFLICT


def test_a_submission_is_stored_without_loss(ledger: Ledger) -> None:
    request = Request(
        request_id="req-x",
        model="SmolLM2-135M-Instruct",
        prompt=(0, 1, 255, 256, 65_536, 2**32 - 1),
        sampling=Sampling(
            max_tokens=2**31 - 1,
            seed=2**64 - 1,
            temperature=0.1 + 0.2,
            top_p=1e-300,
            top_k=-1,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (49_151, 5e-324)),
            min_tokens=3,
            stop_token_ids=(0, 2),
            ignore_eos=True,
            logprobs=20,
        ),
        arrival_s=1_764_460_800.123456,
        priority=-(2**31),
        deadline_s=1_764_460_801.000001,
        tenant="Zoë's 店",
        detached=True,
        cache_salt="salt\0with a NUL",
        stop=("\n\n", "\0", "😀", '"\\'),
        include_stop=True,
        lane=Lane.BATCH,
        queue_deadline_s=1_764_460_800.5,
        retry_of="req-w",
    )
    assert ledger.write([Submission(request, bytes(range(256)))]) == [WRITTEN]
    stored = ledger.find("req-x")
    assert stored is not None
    assert stored.request == request
    assert (stored.state, stored.num_output_tokens, stored.finish_reason, stored.executor) == (State.WAITING, 0, None, "")
    assert ledger.payload_digest("req-x") == bytes(range(256))
    assert ledger.transitions("req-x") == (StoredTransition(None, State.WAITING, request.arrival_s, ""),)


def test_an_unknown_request_has_nothing(ledger: Ledger) -> None:
    assert ledger.find("nobody") is None
    assert ledger.payload_digest("nobody") is None
    assert ledger.output("nobody") == StoredOutput(0, ())
    assert ledger.transitions("nobody") == ()


def test_a_life_is_told_by_its_transitions(ledger: Ledger) -> None:
    run_to_decode(ledger)
    preempted = Transitioned("a", State.DECODE, State.PREEMPTED, 103.0, "no blocks")
    ledger.write([tokens("a", 0, 5), preempted])
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.state, stored.executor, stored.preemptions, stored.first_token_s) == (State.PREEMPTED, "", 1, 103.0)
    ledger.write([prefill("a", before=State.PREEMPTED), decode("a"), tokens("a", 1, 6), done("a")])
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.state, stored.finish_reason, stored.finished_s) == (State.DONE, FinishReason.STOP, 110.0)
    assert (stored.num_output_tokens, stored.first_token_s, stored.preemptions) == (2, 103.0, 1)
    states = [(move.before, move.after) for move in ledger.transitions("a")]
    assert states == [
        (None, State.WAITING),
        (State.WAITING, State.PREFILL),
        (State.PREFILL, State.DECODE),
        (State.DECODE, State.PREEMPTED),
        (State.PREEMPTED, State.PREFILL),
        (State.PREFILL, State.DECODE),
        (State.DECODE, State.DONE),
    ]
    assert ledger.transitions("a")[3] == StoredTransition(State.DECODE, State.PREEMPTED, 103.0, "no blocks")


def test_a_running_request_keeps_its_executor_until_it_stops_running(ledger: Ledger) -> None:
    ledger.write([submission(), prefill()])
    ledger.write([Transitioned("a", State.PREFILL, State.DECODE, 102.0)])
    stored = ledger.find("a")
    assert stored is not None
    assert stored.executor == "x0"
    ledger.write([Transitioned("a", State.DECODE, State.PREEMPTED, 103.0, executor="x0")])
    stored = ledger.find("a")
    assert stored is not None
    assert stored.executor == ""


def test_a_failure_keeps_its_words_and_tokens(ledger: Ledger) -> None:
    run_to_decode(ledger)
    failed = Transitioned("a", State.DECODE, State.FAILED, 104.0, "pool", "x0", FinishReason.ERROR, "outgrew the pool", 8)
    ledger.write([tokens("a", 0, 5, 6), failed])
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.error, stored.error_code, stored.finish_reason) == ("outgrew the pool", 8, FinishReason.ERROR)
    assert (stored.executor, stored.num_output_tokens) == ("", 2)
    assert ledger.output("a").token_ids == (5, 6)


def test_a_whole_life_fits_one_batch(ledger: Ledger) -> None:
    run_to_end(ledger, "other")
    life: list[Record] = [submission(), prefill(), decode(), tokens("a", 0, 5), tokens("a", 1, 6), done()]
    assert ledger.write(life) == [WRITTEN] * len(life)
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.state, stored.num_output_tokens) == (State.DONE, 2)
    assert len(ledger.transitions("a")) == 4


def test_c09_the_same_id_joins_and_another_payload_conflicts(ledger: Ledger) -> None:
    assert ledger.write([submission()]) == [WRITTEN]
    batch = [submission("b"), submission("a"), submission("a", digest=b"other", prompt=(9,)), submission("c")]
    assert ledger.write(batch) == [WRITTEN, JOINED, CONFLICT, WRITTEN]
    stored = ledger.find("a")
    assert stored is not None
    assert stored.request.prompt == (1, 2, 3)
    assert len(ledger.transitions("a")) == 1


def test_c09_the_same_id_twice_in_one_batch(ledger: Ledger) -> None:
    batch: list[Record] = [submission(), submission(), prefill(), submission(digest=b"other")]
    assert ledger.write(batch) == [WRITTEN, JOINED, WRITTEN, CONFLICT]
    stored = ledger.find("a")
    assert stored is not None
    assert stored.state is State.PREFILL


def test_output_from_any_index(ledger: Ledger) -> None:
    """Across chunks that were stored apart, merged and moved."""
    run_to_decode(ledger)
    expected = tuple(range(1000, 1300))
    for index in range(200):
        ledger.write([tokens("a", index, expected[index])])
    ledger.write([tokens("a", index, expected[index]) for index in range(200, 300)])
    for first_index in (0, 1, 63, 64, 65, 127, 128, 199, 200, 299, 300, 1000):
        assert ledger.output("a", first_index) == StoredOutput(first_index, expected[first_index:])
    ledger.write([done()])
    assert ledger.output("a", 130) == StoredOutput(130, expected[130:])


def test_columns_of_one_step_go_to_their_requests(ledger: Ledger) -> None:
    for request_id in ("a", "b", "c"):
        run_to_decode(ledger, request_id)
    ledger.write([TokensGenerated(("a", "b", "c"), (0, 0, 0), (1, 3, 2), (10, 20, 21, 22, 30, 31), 103.0)])
    ledger.write([TokensGenerated(("c", "a"), (2, 1), (1, 1), (32, 11), 104.0)])
    assert [ledger.output(request_id).token_ids for request_id in ("a", "b", "c")] == [(10, 11), (20, 21, 22), (30, 31, 32)]
    stored = ledger.find("c")
    assert stored is not None
    assert (stored.first_token_s, stored.num_output_tokens) == (103.0, 3)


def test_logprobs_come_back_exactly(ledger: Ledger) -> None:
    run_to_decode(ledger)
    entries = [TokenLogprobs(-0.1 * index, tuple((index + k, -1 / (k + 3)) for k in range(index % 4))) for index in range(30)]
    for index, entry in enumerate(entries):
        ledger.write([TokensGenerated(("a",), (index,), (1,), (index,), 103.0, {"a": (entry,)})])
    assert ledger.output("a", 5) == StoredOutput(5, tuple(range(5, 30)), tuple(entries[5:]))
    ledger.write([done()])
    assert ledger.output("a") == StoredOutput(0, tuple(range(30)), tuple(entries))


@pytest.mark.parametrize(
    "bad",
    [
        [tokens("a", 2, 9)],
        [tokens("a", 0, 5)],
        [tokens("a", 1, 9)],
        [tokens("a", 4, 9)],
        [tokens("a", 3, 8), tokens("a", 3, 8)],
        [tokens("a", 3, 8), tokens("a", 5, 9)],
        [tokens("nobody", 0, 9)],
        [prefill("a")],
        [decode("nobody")],
        [done("a"), tokens("a", 3, 8)],
        [done("a"), Updated("a", priority=1)],
        [done("a"), done("a")],
        [Updated("nobody", priority=1)],
        [tokens("ended", 3, 9)],
        [tokens("ended", 0, 9)],
        [tokens("ended without output", 0, 9)],
        [Updated("ended", priority=1)],
        [done("ended")],
    ],
)
def test_what_contradicts_the_ledger_changes_nothing(ledger: Ledger, bad: list[Record]) -> None:
    run_to_decode(ledger, "a")
    ledger.write([tokens("a", 0, 5, 6, 7)])
    run_to_end(ledger, "ended")
    cancelled = Transitioned("ended without output", State.WAITING, State.CANCELLED, 101.0, finish_reason=FinishReason.CANCELLED)
    ledger.write([submission("ended without output"), cancelled])
    before = _all_of(ledger, "a", "ended", "ended without output")
    with pytest.raises(LedgerConflict):
        ledger.write([submission("new"), Updated("a", priority=5), *bad])
    assert _all_of(ledger, "a", "ended", "ended without output") == before
    assert ledger.find("new") is None
    assert ledger.write([submission("new"), tokens("a", 3, 8)]) == [WRITTEN, WRITTEN]


# The shortest way to each state.
_WAYS: dict[State, tuple[State, ...]] = {
    State.WAITING: (State.WAITING,),
    State.PREFILL: (State.WAITING, State.PREFILL),
    State.DECODE: (State.WAITING, State.PREFILL, State.DECODE),
    State.PREEMPTED: (State.WAITING, State.PREFILL, State.PREEMPTED),
    State.DONE: (State.WAITING, State.PREFILL, State.DONE),
    State.CANCELLED: (State.WAITING, State.CANCELLED),
    State.EXPIRED: (State.WAITING, State.EXPIRED),
    State.FAILED: (State.WAITING, State.FAILED),
}


def _way(request_id: str, *states: State) -> list[Record]:
    return [Transitioned(request_id, before, after, 101.0) for before, after in itertools.pairwise(states)]


@pytest.mark.parametrize("before", State)
def test_a_move_that_the_table_lacks_changes_nothing(ledger: Ledger, before: State) -> None:
    """Though the request is in the state that it leaves: alone, and amid legal moves of one batch."""
    ledger.write([submission(), *_way("a", *_WAYS[before])])
    known = _all_of(ledger, "a")
    for after in sorted(set(State) - TRANSITIONS[before]):
        amid = [submission("b"), *_way("b", *_WAYS[before], after, *sorted(TRANSITIONS[after])[:1])]
        for bad in (_way("a", before, after), amid):
            with pytest.raises(LedgerConflict):
                ledger.write([submission("new"), *bad])
            assert _all_of(ledger, "a") == known
            assert ledger.find("new") is None
            assert ledger.find("b") is None


@pytest.mark.parametrize("before", State)
def test_every_move_of_the_table_is_written(ledger: Ledger, before: State) -> None:
    for after in sorted(TRANSITIONS[before]):
        ledger.write([submission(after.value), *_way(after.value, *_WAYS[before])])
        ledger.write(_way(after.value, before, after))
        stored = ledger.find(after.value)
        assert stored is not None
        assert stored.state is after


def _all_of(ledger: Ledger, *request_ids: str) -> list[object]:
    return [(ledger.find(id_), ledger.output(id_), ledger.transitions(id_)) for id_ in request_ids]


def test_updates_change_what_they_name(ledger: Ledger) -> None:
    ledger.write([submission(deadline_s=200.0)])
    ledger.write([Updated("a", priority=5), Updated("a", deadline_s=300.5), Updated("a", priority=6)])
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.request.priority, stored.request.deadline_s) == (6, 300.5)


def test_an_empty_batch_is_written(ledger: Ledger) -> None:
    assert ledger.write([]) == []


def test_unfinished_in_order_of_arrival_with_output(ledger: Ledger) -> None:
    run_to_end(ledger, "ended")
    ledger.write([submission("late", arrival_s=102.0), submission("tie", arrival_s=101.0), submission("first", arrival_s=100.0)])
    ledger.write([submission("tied", arrival_s=101.0)])
    ledger.write([prefill("tie"), decode("tie"), tokens("tie", 0, 1, 2)])
    found = list(ledger.unfinished())
    assert [stored.request.request_id for stored, _ in found] == ["first", "tie", "tied", "late"]
    assert found[1] == (ledger.find("tie"), StoredOutput(0, (1, 2)))
    assert found[0][1] == StoredOutput(0, ())


def test_unfinished_reads_more_than_a_page(ledger: Ledger) -> None:
    ledger.write([submission(f"r{number:04d}", arrival_s=number / 8) for number in range(600)])
    ledger.write([tokens(f"r{number:04d}", 0, number) for number in range(0, 600, 7)])
    found = [(stored.request.request_id, output.token_ids) for stored, output in ledger.unfinished()]
    assert found == [(f"r{number:04d}", (number,) if number % 7 == 0 else ()) for number in range(600)]


def test_queries_filter_and_page(ledger: Ledger) -> None:
    for number in range(7):
        ledger.write(
            [submission(f"r{number}", arrival_s=100.0 + number // 2, priority=number, tenant="odd" if number % 2 else "even")]
        )
    ledger.write([prefill("r3"), prefill("r4")])

    def found(query: RequestQuery) -> list[str]:
        return [stored.request.request_id for stored in ledger.query(query).requests]

    assert found(RequestQuery()) == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert found(RequestQuery(oldest_first=True, limit=2)) == ["r0", "r1"]
    assert found(RequestQuery(states=(State.PREFILL,))) == ["r4", "r3"]
    assert found(RequestQuery(tenant="odd", min_priority=3)) == ["r5", "r3"]
    assert found(RequestQuery(model="model", max_priority=1)) == ["r1", "r0"]
    assert found(RequestQuery(model="another")) == []
    for oldest_first in (True, False):
        pages: list[str] = []
        token = ""
        while not pages or token:
            page = ledger.query(RequestQuery(oldest_first=oldest_first, limit=2, page_token=token))
            pages += [stored.request.request_id for stored in page.requests]
            token = page.next_page_token
        assert pages == sorted(pages, reverse=not oldest_first)
        assert len(pages) == 7


@pytest.mark.parametrize("page_token", ["x", "é", "AAAA", "bmFuIDE=", "MHgxcDAgLTE=", "MHgxcDAgOTk5OTk5OTk5OTk5OTk5OTk5OTk5"])
def test_a_foreign_page_token_is_refused(ledger: Ledger, page_token: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the words are each ledger's own
        ledger.query(RequestQuery(page_token=page_token))


def test_pruning_takes_the_oldest_ended_ones(ledger: Ledger) -> None:
    for number in range(4):
        run_to_end(ledger, f"ended{number}", at_s=110.0 + number)
    run_to_decode(ledger, "open")
    assert ledger.prune(113.0, limit=2) == 2
    assert [ledger.find(f"ended{number}") is None for number in range(4)] == [True, True, False, False]
    assert ledger.prune(113.0, limit=2) == 1
    assert ledger.prune(113.0, limit=2) == 0
    assert ledger.find("open") is not None
    assert ledger.output("ended3").token_ids == (5, 6, 7)
    assert (ledger.output("ended0").token_ids, ledger.transitions("ended0")) == ((), ())
    assert ledger.write([submission("ended0")]) == [WRITTEN]
