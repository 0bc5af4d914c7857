"""Which models can be asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_executor.simulated_tokenizer import tokenizer_files
from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.desk.errors import Unavailable, UnknownModel
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.wire import ExecutorFacts


def facts(name: str, model: str = "m", digest: str = "d", num_blocks: int = 10, max_model_len: int = 100) -> ExecutorFacts:
    description = ExecutorDescription(name, model, 4, num_blocks, max_model_len, 8, 64)
    return ExecutorFacts(description, digest, vocab_size=50, device="cpu", epoch=0, version="1")


@pytest.fixture
async def models() -> Models:
    known = Models()
    for digest in ("d", "e"):
        await known.learn_tokenizer(digest, tokenizer_files())
    return known


async def test_before_any_executor_there_is_none_yet(models: Models) -> None:
    with pytest.raises(Unavailable, match="no executor has connected yet"):
        models.find("m")
    assert models.all() == ()


async def test_the_only_model_needs_no_name(models: Models) -> None:
    models.joined(facts("x"))
    assert models.find("").name == models.find("m").name == "m"
    models.joined(facts("y", model="n"))
    with pytest.raises(UnknownModel, match="name one of the models: m, n"):
        models.find("")
    with pytest.raises(UnknownModel, match="'o' is not served; there is: m, n"):
        models.find("o")


async def test_a_model_has_the_largest_pool_and_the_smallest_length_of_its_executors(models: Models) -> None:
    models.joined(facts("x", num_blocks=10, max_model_len=100))
    models.joined(facts("y", num_blocks=30, max_model_len=80))
    served = models.find("m")
    assert (served.pool_tokens, served.max_model_len, served.executors) == (120, 80, 2)
    models.lost("y")
    served = models.find("m")
    assert (served.pool_tokens, served.max_model_len, served.executors) == (40, 100, 1)


async def test_a_model_stays_known_while_its_executors_are_away(models: Models) -> None:
    models.joined(facts("x"))
    models.lost("x")
    served = models.find("m")
    assert (served.pool_tokens, served.executors) == (40, 0)


async def test_two_tokenizers_for_one_model_conflict_while_both_are_connected(models: Models) -> None:
    models.joined(facts("x"))
    other = facts("y", digest="e")
    assert models.conflict(other) == "executor y serves model m with another tokenizer than executor x"
    assert models.conflict(facts("y")) == ""
    assert models.conflict(replace(other, description=replace(other.description, model="n"))) == ""
    assert models.conflict(facts("x", digest="e")) == "", "an executor may come back with another model behind the name"
    models.lost("x")
    assert models.conflict(other) == ""


async def test_files_that_are_no_tokenizer_are_refused() -> None:
    models = Models()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await models.learn_tokenizer("d", {})
    assert not models.knows_tokenizer("d")
