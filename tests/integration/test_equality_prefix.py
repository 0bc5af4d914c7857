"""Same greedy tokens with and without the prefix cache, on a small random model run by the real engine.

Cold and warm, at lengths around whole blocks, in shared batches, resumed after preemptions, and turn after turn; against what
transformers generates. The C++ backend is held against itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenmill_executor.engine import Engine
from tokenmill_executor.model import load_runner
from tokenmill_executor.prefix import PrefixHasher, hash_function
from tokenmill_executor.records import Admission, Plan, SequenceFault
from tokenmill_executor.runner import Runner, SamplingParams

from tests.fakes.models import greedy_tokens, random_model

BLOCK = 16
NUM_BLOCKS = 40
NEW = 6


class Server:
    """An engine, driven as plainly as can be. `hits` counts tokens taken from the cache."""

    def __init__(self, runner: Runner, caching: bool, num_blocks: int = NUM_BLOCKS) -> None:
        hasher = PrefixHasher(hash_function("sha256"), "m", BLOCK) if caching else None
        self.engine = Engine(runner, num_blocks, BLOCK, max_num_seqs=16, hasher=hasher)
        self.hits = 0
        self._plans = 0
        self._sequences = 0

    def generate(self, prompts: Sequence[list[int]], count: int = NEW, most: int = 64, preempt_every: int = 0) -> list[list[int]]:
        """All at once; every so many steps the sequence that is farthest is given up and admitted anew."""
        outputs: list[list[int]] = [[] for _ in prompts]
        owners: dict[int, int] = {}
        waiting, steps = list(range(len(prompts))), 0
        release: list[int] = []
        while waiting or owners:
            admit = []
            for owner in waiting:
                self._sequences += 1
                owners[self._sequences] = owner
                tokens = [*prompts[owner], *outputs[owner]]
                params = SamplingParams(max_tokens=count, seed=0, temperature=0.0, ignore_eos=True)
                admit.append(Admission(self._sequences, tokens, len(prompts[owner]), params))
            self._plans += 1
            steps += 1
            result = self.engine.carry_out(Plan(1, self._plans, release, admit, list(owners), [most] * len(owners)))
            self.engine.check()
            self.hits += sum(result.num_cached)
            waiting, release = [], []
            sampled_tokens = iter(result.token_ids)
            for sequence_id, sampled, finish in zip(result.sequence_ids, result.num_sampled, result.finishes, strict=True):
                outputs[owners[sequence_id]] += [next(sampled_tokens) for _ in range(sampled)]
                if finish:
                    del owners[sequence_id]
            assert all(fault.fault is SequenceFault.NO_BLOCKS for fault in result.faults), result.faults
            if owners and (result.faults or (preempt_every and steps % preempt_every == 0)):
                victim = max(owners, key=lambda sequence_id: len(outputs[owners[sequence_id]]))
                waiting, release = [owners.pop(victim)], [victim]
        return outputs


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model("llama").save_pretrained(path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return load_runner(folder, device="cpu", threads=1, dtype="float32")


def expected(prompts: Sequence[list[int]], count: int = NEW) -> list[list[int]]:
    oracle = random_model("llama")
    return [greedy_tokens(oracle, tokens, count) for tokens in prompts]


@pytest.mark.parametrize("length", [n * BLOCK + d for n in (1, 2, 3) for d in (-1, 0, 1)])
def test_cold_and_warm_around_whole_blocks(runner: Runner, length: int) -> None:
    tokens = [prompt(length)]
    without = Server(runner, caching=False)
    oracle = expected(tokens)
    assert without.generate(tokens) == without.generate(tokens) == oracle
    cached = Server(runner, caching=True)
    assert cached.generate(tokens) == oracle
    assert cached.hits == 0
    assert cached.generate(tokens) == oracle
    assert cached.hits == (length - 1) // BLOCK * BLOCK
    # In chunks that end within blocks, too.
    assert cached.generate(tokens, most=5) == oracle


def test_one_block_in_many_rows_of_a_batch(runner: Runner) -> None:
    prefix = prompt(2 * BLOCK)
    prompts = [[*prefix, *prompt(3, seed)] for seed in range(6)]
    server = Server(runner, caching=True)
    server.generate([[*prefix, 7]], count=1)
    assert server.generate(prompts) == expected(prompts)
    assert server.hits == 6 * 2 * BLOCK


def test_c19_preempted_again_and_again_on_a_small_pool(runner: Runner) -> None:
    prefix = prompt(BLOCK + 3, seed=9)
    prompts = [[*prefix, *prompt(length, seed)] for seed, length in enumerate((1, 14, 30, 13, 29))]
    oracle = expected(prompts, 20)
    for caching in (False, True):
        server = Server(runner, caching, num_blocks=12)
        assert server.generate(prompts, count=20, preempt_every=3) == oracle
        assert (server.hits > 0) == caching


def test_turn_after_turn(runner: Runner) -> None:
    server = Server(runner, caching=True)
    warm, cold = prompt(20), prompt(20)
    for turn in range(4):
        warm += [*server.generate([warm], count=13)[0], *prompt(5, turn)]
    bare = Server(runner, caching=False)
    for turn in range(4):
        cold += [*bare.generate([cold], count=13)[0], *prompt(5, turn)]
    assert warm == cold
    # Each turn but the first begins with all full blocks of the one before, but its last token.
    assert server.hits == sum((20 + 18 * turn - 6) // BLOCK * BLOCK for turn in (1, 2, 3))


def test_the_cpp_backend_reads_shared_blocks(folder: Path) -> None:
    runner = load_runner(folder, device="cpu", threads=1, dtype="bfloat16", block_size=BLOCK)
    prefix = prompt(2 * BLOCK)
    prompts = [[*prefix, *prompt(3, seed)] for seed in range(6)]
    alone = [Server(runner, caching=False).generate([tokens])[0] for tokens in prompts]
    server = Server(runner, caching=True)
    server.generate([[*prefix, 7]], count=1)
    assert server.generate(prompts) == alone
    assert server.hits == 6 * 2 * BLOCK
