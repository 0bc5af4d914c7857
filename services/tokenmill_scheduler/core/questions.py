"""What may be asked of a scheduler: where it stands, and why. Nothing here changes anything. Must not know: how it decides."""

from __future__ import annotations

from collections import Counter

from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.counters import Counters, ExecutorView
from tokenmill_scheduler.core.drain import Drain
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.overload import Stage
from tokenmill_scheduler.core.request import QUEUED, Lane, Request, State
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.strays import Strays
from tokenmill_scheduler.core.waiting import WaitReason, WaitReasons
from tokenmill_scheduler.core.warden import Warden


class Questions:
    """The answers are as of the last event."""

    def __init__(self, roster: Roster, batching: Batching, room: Room, warden: Warden) -> None:
        self._roster = roster
        self._batching = batching
        self._room = room
        self._warden = warden
        self._strays = Strays(roster, room)
        self._reasons = WaitReasons(roster, batching, room, warden)

    def owner(self, executor: str, sequence_id: int) -> str | None:
        """The request whose tokens a result for this sequence would be kept for; None if it would be dropped as stale."""
        known = self._roster.executors.get(executor)
        sequence = known.sequence(sequence_id) if known is not None else None
        return sequence.live.request_id if sequence is not None and sequence.live is not None else None

    def strays(self, patience_s: float) -> dict[str, tuple[str, ...]]:
        """Waiting requests that executors of other schedulers can run and none here can, by executor (see `strays.py`)."""
        return self._strays.find(patience_s)

    def losses(self, request_id: str) -> int:
        """How many executors a request here is suspected to have cost."""
        return len(self._roster.requests[request_id].lost_with)

    def next_wakeup_s(self) -> float | None:
        """When to hand in a Tick, and ask for plans, although nothing has happened: a deadline, the start of a static batch, a
        tenant that may use tokens again, or a look at the overload.

        Unix seconds; may have passed already. None: only an event can change anything.
        """
        times = [
            due_s
            for executor in self._roster.executors.values()
            if executor.has_plan_room
            for due_s in self._chances_s(executor)
            if due_s > executor.asked_s
        ]
        earliest = self._roster.deadlines.earliest()
        times += [earliest[0]] if earliest else []
        next_look_s = self._warden.next_look_s()
        return min(times if next_look_s is None else [*times, next_look_s], default=None)

    def _chances_s(self, executor: ExecutorState) -> list[float]:
        """When an executor with room for a plan may admit somebody whom it did not admit before."""
        batch_s = self._batching.wakeup_s(executor, self._roster.queue(executor.description.model))
        refill_s = self._roster.quotas.next_refill_s
        return [due_s for due_s in (batch_s, refill_s) if due_s is not None]

    def max_num_seqs(self, executor: str) -> int:
        """Most sequences in a step of an executor that has joined."""
        return self._roster.executors[executor].max_num_seqs

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Of a prompt of so many tokens, the most that can ever run at once; None while no executor of the model is known."""
        return self._room.most_choices(model, num_prompt_tokens, max_tokens)

    def wait_reason(self, request_id: str) -> str:
        """Why a request waits, in a few words; empty if it does not wait or is unknown."""
        why = self.why_waits(request_id)
        return "" if why is None else why.words

    def why_waits(self, request_id: str) -> WaitReason | None:
        """None if it does not wait or is unknown."""
        live = self._roster.requests.get(request_id)
        return None if live is None or live.state not in QUEUED else self._reasons.of(live)

    def wait_reasons(self) -> dict[str, int]:
        """Waiting requests by why they wait; of a long queue the first are looked at (see `waiting.py`)."""
        return self._reasons.counts()

    @property
    def ordering(self) -> Ordering:
        return self._roster.ordering

    def never_within_quota(self, request: Request) -> str:
        """Which quota a request exceeds by itself, with all its choices, and what to do, in a few words; empty: none."""
        quota, tenant = self._roster.quotas.of(request.tenant), request.tenant
        if quota.max_num_seqs is not None and request.best_of > quota.max_num_seqs:
            words = (
                f"the request has {request.best_of} choices, and tenant {tenant} may have {quota.max_num_seqs} sequences running"
            )
            return f"{words}: ask for fewer"
        blocks = self._room.least_blocks(request)
        if quota.max_kv_blocks is not None and blocks > quota.max_kv_blocks:
            words = f"the request may come to {blocks} KV blocks, more than the {quota.max_kv_blocks} that tenant {tenant} may hold"
            return f"{words}: ask for a lower max_tokens"
        return ""

    def over_quota(self, request: Request, now_s: float) -> str:
        """Which quota would make a request wait that came now, in a few words; empty: none."""
        queued = self._roster.backlog.num_waiting(request.tenant)
        blocks = self._room.least_blocks(request)
        return self._roster.quotas.over(request.tenant, request.best_of, blocks, now_s, queued)

    def tokens_ready_s(self, tenant: str, now_s: float) -> float:
        """When its quota of tokens per second lets the tenant's requests run; `now_s` if it does, infinity if it never will."""
        return self._roster.quotas.ready_s(tenant, now_s)

    @property
    def overload_stage(self) -> Stage:
        return self._warden.stage

    @property
    def overload_why(self) -> str:
        """Empty while nothing is held back."""
        return self._warden.why

    @property
    def num_queued_tokens(self) -> int:
        """The most that all queued requests may come to, prompts and output."""
        return self._roster.backlog.tokens(*Lane)

    @property
    def queue_drain(self) -> Drain:
        """How fast the queue empties."""
        return self._roster.backlog.drain

    @property
    def paused(self) -> str:
        """Why the queue is; empty when it is not."""
        return self._roster.paused

    @property
    def counters(self) -> Counters:
        """Live: copy what you keep."""
        return self._roster.counters

    def running_by_lane(self) -> dict[Lane, int]:
        """Requests in the batches that executors carry out now: at most as many as they have slots."""
        executing = [sequence.live for executor in self._roster.executors.values() for sequence in executor.executing()]
        lanes = Counter(live.request.lane for live in executing if live is not None)
        return {lane: lanes[lane] for lane in Lane}

    @property
    def num_running(self) -> int:
        """Admitted, those among them whose first step is not the one carried out now (`running_by_lane`)."""
        return sum(len(executor.running) for executor in self._roster.executors.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._roster.queues.values())

    @property
    def kv_cache_usage(self) -> float:
        """Held blocks over all blocks of the executors that are there; 0 without any."""
        blocks = [executor.blocks for executor in self._roster.executors.values() if executor.joined]
        total = sum(b.total for b in blocks)
        return sum(b.held for b in blocks) / total if total else 0.0

    def state(self, request_id: str) -> State | None:
        """None once it has ended, or if it never was."""
        live = self._roster.requests.get(request_id)
        return live.state if live is not None else None

    def executors(self) -> tuple[ExecutorView, ...]:
        """In the order they first joined, lost ones among them."""
        drained = self._roster.drained
        return tuple([_view(executor, executor.name in drained) for executor in self._roster.executors.values()])


def _view(executor: ExecutorState, drained: bool) -> ExecutorView:
    description = executor.description
    return ExecutorView(
        name=description.name,
        model=description.model,
        joined=executor.joined,
        epoch=executor.epoch,
        block_size=description.block_size,
        blocks=executor.blocks,
        free_blocks=executor.forecast.free,
        running=len(executor.executing()),
        steps=executor.steps,
        plans_out=len(executor.plans_out),
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        drained=drained,
    )
