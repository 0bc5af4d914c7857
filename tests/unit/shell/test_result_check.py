"""What an executor may not answer, each with its words; a row at a time, since a result is refused as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenmill_scheduler.core.plans import Admission, Blocks, ExecutorDescription, Fault, Plan, Result, SequenceFault
from tokenmill_scheduler.core.request import Sampling
from tokenmill_scheduler.result_check import ResultCheck
from tokenmill_scheduler.wire import ExecutorFacts, ProtocolError

FACTS = ExecutorFacts(ExecutorDescription("x", "m", 4, 10, 20, 2, 16, 2), "d", vocab_size=50, device="cpu", epoch=0, version="1")
BLOCKS = Blocks(free=7, cached=2, held=1)
ADMISSION = Admission(1, (5, 6, 7), 3, Sampling(max_tokens=2, seed=0))
FIRST = Plan(1, 1, (), (ADMISSION,), (1,), (3,))
SECOND = Plan(1, 2, (), (), (1,), (1,))


def result(plan_id: int = 1, computed: int = 3, tokens: tuple[int, ...] = (49,), finish: int = 0, **changes: Any) -> Result:
    return replace(Result(1, plan_id, (1,), (computed,), (len(tokens),), tokens, (finish,), BLOCKS), **changes)


def check_of(*plans: Plan) -> ResultCheck:
    made = ResultCheck(FACTS)
    for plan in plans:
        made.sent(plan)
    return made


def refusal(checked: ResultCheck, plan: Plan, answer: Result) -> str:
    with pytest.raises(ProtocolError) as refused:
        checked.check(plan, answer)
    return str(refused.value)


def test_a_sequence_goes_from_its_prompt_to_its_limit() -> None:
    checked = check_of(FIRST, SECOND)
    checked.check(FIRST, result())
    checked.check(SECOND, result(2, 1, (8,), finish=2))
    # A plan that was out when it ended advances it by nothing.
    checked.check(replace(SECOND, plan_id=3), result(3, 0, ()))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (result(sequence_ids=(2,)), "result 1 has other rows than its plan"),
        (
            result(sequence_ids=(), num_computed=(), num_sampled=(), token_ids=(), finishes=()),
            "result 1 has other rows than its plan",
        ),
        (result(computed=4), "result 1 has a sequence that computed more tokens than it was to"),
        (result(num_steps=2), "result 1 took 2 steps, 1 were the most"),
        (result(tokens=(50,)), "result 1 has token 50, the vocabulary has 50"),
        (result(blocks=Blocks(11, 0, 0)), "result 1 tells of 11 blocks, there are 10"),
        (result(num_cached=(1,)), "result 1 has 4 tokens of sequence 1 computed, 4 are known"),
        (result(tokens=()), "result 1 has 3 tokens of sequence 1 computed, 3 are known"),
        (result(tokens=(1, 2)), "result 1 has sequence 1 go on at 5 tokens, its limit is 5"),
        (result(finish=2), "result 1 ends sequence 1 for its length at 4 tokens, its limit is 5"),
        (result(tokens=(1, 2, 3), finish=2), "result 1 has sequence 1 go on at 6 tokens, its limit is 5"),
    ],
)
def test_what_no_executor_can_have_done(answer: Result, words: str) -> None:
    assert refusal(check_of(FIRST), FIRST, answer) == words


@pytest.mark.parametrize("ended", ["finish", "fault", "release"])
def test_a_sequence_that_has_ended_goes_on_no_more(ended: str) -> None:
    checked = check_of(FIRST)
    faults = {1: Fault(SequenceFault.ERROR, "")} if ended == "fault" else {}
    first = result(computed=0, tokens=(), faults=faults) if faults else result(finish=ended == "finish")
    checked.check(replace(FIRST, release=(1,)) if ended == "release" else FIRST, first)
    assert refusal(checked, SECOND, result(2, 1, (8,))) == "result 2 advances sequence 1, which had ended"


def test_a_sequence_without_free_blocks_has_not_ended() -> None:
    checked = check_of(FIRST)
    checked.check(FIRST, result(computed=0, tokens=(), faults={1: Fault(SequenceFault.NO_BLOCKS, "")}))
    checked.check(replace(FIRST, plan_id=2, admit=()), result(2))


def test_the_context_length_is_a_limit() -> None:
    long = replace(ADMISSION, sampling=Sampling(max_tokens=100, seed=0), token_ids=(5,) * 19, num_prompt_tokens=19)
    plan = replace(FIRST, admit=(long,), advance_max_tokens=(19,))
    assert refusal(check_of(plan), plan, result(computed=19)) == "result 1 has sequence 1 go on at 20 tokens, its limit is 20"
    check_of(plan).check(plan, result(computed=19, finish=2))


STEPS = Plan(1, 2, (), (), (1, 2), (4, 4), max_steps=4)


def test_a_plan_that_no_other_cuts_short_takes_all_its_steps() -> None:
    checked, cut = steps_of((2, 2), (0, 2))
    checked.check(STEPS, cut)
    checked, cut = steps_of((2, 2), (0, 2))
    with pytest.raises(ProtocolError, match="result 2 took 2 steps, and not all 4"):
        checked.check(STEPS, cut, uncut=True)


@pytest.mark.parametrize(
    ("computed", "finishes", "faults"),
    [((2, 2), (1, 2), {}), ((2, 1), (1, 0), {2: Fault(SequenceFault.NO_BLOCKS, "")}), ((2, 0), (1, 0), {})],
)
def test_fewer_steps_are_all_that_can_be_taken_once_nobody_goes_on(
    computed: tuple[int, int], finishes: tuple[int, int], faults: dict[int, Fault]
) -> None:
    checked, short = steps_of(computed, finishes, faults)
    checked.check(STEPS, short, uncut=True)


def steps_of(
    computed: tuple[int, int], finishes: tuple[int, int], faults: dict[int, Fault] | None = None
) -> tuple[ResultCheck, Result]:
    """Two sequences that decode, the second for two tokens more, and how two steps of theirs went."""
    admissions = [replace(ADMISSION, sequence_id=i, sampling=Sampling(max_tokens, seed=0)) for i, max_tokens in ((1, 9), (2, 3))]
    first = Plan(1, 1, (), tuple(admissions), (1, 2), (3, 3))
    checked = check_of(first, STEPS)
    checked.check(first, Result(1, 1, (1, 2), (3, 3), (1, 1), (7, 7), (0, 0), BLOCKS))
    return checked, Result(1, 2, (1, 2), computed, computed, (7,) * sum(computed), finishes, BLOCKS, faults or {}, num_steps=2)
