"""A prompt of 32K tokens through scheduler and executor in chunks, beyond the context that the model was trained for.

Both are the real ones, joined by the messages of the plan protocol. The model is tiny and random: one layer sees all, one a window.
"""

from __future__ import annotations

import resource
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_executor import wire as executor_wire
from tokenmill_executor.engine import Engine
from tokenmill_executor.model import load_runner
from tokenmill_scheduler import wire as scheduler_wire
from tokenmill_scheduler.core import invariants
from tokenmill_scheduler.core.effects import Effect, PlanIssued, TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Event, ExecutorJoined, PlanDue, ResultArrived, Submitted
from tokenmill_scheduler.core.plans import BlockGroup, ExecutorDescription, Plan
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig

from tests.fakes.models import random_model

PROMPT, OUTPUT, BLOCK_SIZE, CHUNK, WINDOW = 32_768, 8, 16, 2048, 512
# Of the full layer all blocks of the long prompt, of the other what windows and chunks touch, and the short ones.
NUM_BLOCKS = 2400
MOST_GROWTH_BYTES = 400 << 20
MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 36_864,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.5, "original_max_position_embeddings": 8192},
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}


@dataclass
class Service:
    """Two plans are out at any time, as over a network; what one side tells the other goes through messages."""

    engine: Engine
    description: ExecutorDescription
    now_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    output: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    most_held: int = 0

    def __post_init__(self) -> None:
        tokens = self.description.max_num_batched_tokens
        self.core = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=tokens))
        self.codec = scheduler_wire.Codec()
        self.out: deque[pb.Plan] = deque()
        blocks = scheduler_wire.blocks(executor_wire.encode_welcome(1, self.engine.release_all()).welcome.blocks)
        self.handle(ExecutorJoined(self.description, 1, blocks))

    def handle(self, event: Event) -> list[Effect]:
        self.now_s += 0.01
        effects = self.core.handle(event, self.now_s)
        invariants.check(self.core)
        for effect in effects:
            if isinstance(effect, Transitioned):
                self.states[effect.request_id] = effect.after
            elif isinstance(effect, TokensGenerated):
                start = 0
                for request_id, count in zip(effect.request_ids, effect.counts, strict=True):
                    self.output.setdefault(request_id, []).extend(effect.token_ids[start : start + count])
                    start += count
        return effects

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = Sampling(max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        self.handle(Submitted(Request(request_id, self.description.model, tuple(prompt), sampling, self.now_s)))

    def plan(self) -> bool:
        for effect in self.handle(PlanDue(self.description.name)):
            if isinstance(effect, PlanIssued):
                self.plans.append(effect.plan)
                self.out.append(self.codec.encode(effect.plan).plan)
                return True
        return False

    def step(self) -> None:
        """The executor carries out the oldest plan; what it has free is never less than what the scheduler believes."""
        message = self.out.popleft()
        limits = executor_wire.PlanLimits(self.description.max_num_seqs, self.description.max_num_batched_tokens)
        result = self.engine.carry_out(executor_wire.decode_plan(message, 1, message.plan_id, limits))
        assert not result.faults, "a plan needed a block that was not there"
        answer = executor_wire.encode_result(result, executor_wire.ServiceTimes(0.0, 0.0))
        self.most_held = max(self.most_held, result.blocks.held)
        self.handle(ResultArrived(self.description.name, self.codec.decode(answer.result)))
        (view,) = self.core.executors()
        assert view.free_blocks <= result.blocks.free

    def run(self) -> None:
        while self.plan() or self.out:
            while len(self.out) < 2 and self.plan():
                pass
            self.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("long")
    oracle = random_model("qwen3", **MODEL)
    oracle.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return oracle, folder


def serve(folder: Path, num_blocks: int = NUM_BLOCKS) -> Service:
    runner = load_runner(folder, dtype="float32", device="cpu", block_size=BLOCK_SIZE)
    groups = tuple(BlockGroup(group.sliding_window or 0, group.sinks) for group in runner.description.block_groups)
    engine = Engine(runner, num_blocks, BLOCK_SIZE, max_num_seqs=8)
    length = runner.description.max_model_len
    return Service(engine, ExecutorDescription("x", "long", BLOCK_SIZE, num_blocks, length, 8, CHUNK, block_groups=groups))


def tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 211, count)]


def in_chunks(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates, itself in chunks: it makes masks of all pairs."""
    from transformers import DynamicCache

    cache, output, ids = DynamicCache(config=oracle.config), [], torch.tensor([prompt])
    with torch.inference_mode():
        for start in range(0, len(prompt), CHUNK):
            logits = oracle(ids[:, start : start + CHUNK], cache=cache, logits_to_keep=1).logits
        for _ in range(count):
            output.append(int(logits[0, -1].argmax()))
            logits = oracle(torch.tensor([[output[-1]]]), cache=cache).logits
    return output


def test_a_prompt_of_32k_tokens_while_others_decode(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    service = serve(folder)
    short = {f"s{index}": tokens(20 + index, index) for index in range(3)}
    for request_id, prompt in short.items():
        service.submit(request_id, prompt, 64)
    assert service.plan()
    service.step()
    before_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    service.submit("long", tokens(PROMPT, 9), OUTPUT)
    service.run()
    assert 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_bytes < MOST_GROWTH_BYTES
    assert set(service.states.values()) == {State.DONE}
    assert (service.core.counters.no_blocks, service.core.counters.preemptions) == (0, 0)
    _check_others_went_on(service, len(short))
    # One group keeps all of the prompt, the other what a window and a chunk touch; nothing like the whole of both.
    assert PROMPT // BLOCK_SIZE < service.most_held < PROMPT // BLOCK_SIZE + 300
    assert service.output["long"] == in_chunks(oracle, tokens(PROMPT, 9), OUTPUT)
    for request_id, prompt in short.items():
        assert service.output[request_id] == in_chunks(oracle, prompt, 64)


def _check_others_went_on(service: Service, others: int) -> None:
    """Each plan that computes a chunk of the long prompt has a token for every decoding sequence."""
    chunked = [plan for plan in service.plans[1:] if max(plan.advance_max_tokens) > 1]
    assert len(chunked) == -(-PROMPT // (CHUNK - others))
    assert all(sorted(plan.advance_max_tokens)[:-1] == [1] * others for plan in chunked)


def test_what_can_never_fit_is_refused_by_the_same_arithmetic(model: tuple[Any, Path]) -> None:
    """The layer that sees all needs a block for each 16 tokens; the other needs few, however long the prompt."""
    service = serve(model[1], PROMPT // BLOCK_SIZE - 10)
    service.submit("long", tokens(PROMPT, 9), OUTPUT)
    service.run()
    assert service.states["long"] is State.FAILED
    assert service.most_held == 0
    (executor,) = service.core._roster.executors.values()
    assert executor.can_hold(PROMPT - 100 * BLOCK_SIZE)
