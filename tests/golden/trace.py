"""Golden traces: a text of commands to the scheduler core, each followed by what it led to.

Lines that start with `> ` are commands, with `#` comments; indented lines are outcomes. `python -m tests.golden.trace` writes the
outcomes of all traces anew; read the difference before you commit it. Requests are named by seed (`r1`), sequences by number.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill_scheduler.core.effects import Effect, OverloadChanged, PlanIssued, TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import ResultArrived, TextStop, Updated
from tokenmill_scheduler.core.plans import Plan, SequenceFault
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description

TRACES = Path(__file__).parent / "traces"


def render(text: str) -> str:
    """The trace with its outcomes as they are now."""
    tracer = Tracer()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line.startswith("> "):
            lines += [f"  {outcome}" for outcome in tracer.run(line[2:])]
    return "\n".join(lines) + "\n"


class Tracer:
    """`config` and `executor` lines come first; the world is made at the first other command."""

    def __init__(self) -> None:
        self._config = SchedulerConfig()
        self._executors: list[dict[str, Any]] = []
        self._overlap = False
        self._world: World | None = None

    @property
    def world(self) -> World:
        if self._world is None:
            self._world = World(self._config, *[description(**shape) for shape in self._executors], overlap=self._overlap)
            self._world.effects.clear()
        return self._world

    def run(self, line: str) -> list[str]:
        name, *words = shlex.split(line)
        options = {key: _value(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
        command: Callable[..., list[str]] = getattr(self, f"do_{name}")
        return command(*[word for word in words if "=" not in word], **options)

    # ---- the stage ----

    def do_config(self, **options: Any) -> list[str]:
        self._overlap = bool(options.pop("overlap", False))
        self._config = replace(self._config, **options)
        return []

    def do_executor(self, name: str, **options: Any) -> list[str]:
        self._executors.append({"name": name, **options})
        return []

    # ---- events ----

    def do_submit(self, seed: str, **options: Any) -> list[str]:
        if "deadline" in options:
            options["deadline_s"] = self.world.now_s + options.pop("deadline")
        return self._effects(lambda: self.world.submit(int(seed), **options))

    def do_cancel(self, request_id: str) -> list[str]:
        return self._effects(lambda: self.world.cancel(request_id))

    def do_update(self, request_id: str, priority: int | None = None, deadline: float | None = None) -> list[str]:
        deadline_s = None if deadline is None else self.world.now_s + deadline
        return self._effects(lambda: self.world.update(request_id, priority, deadline_s))

    def do_tick(self, seconds: str) -> list[str]:
        return self._effects(lambda: self.world.tick(float(seconds)))

    def do_plan(self, executor: str = "x", send: int = 1) -> list[str]:
        return self._effects(lambda: self.world.plan(executor, send=bool(send)))

    def do_step(self, executor: str = "x") -> list[str]:
        """The executor carries out its oldest plan."""
        result = self.world.step(executor)
        columns = zip(result.sequence_ids, result.num_computed, result.num_sampled, result.finishes, strict=True)
        rows = [_row(*row) for row in columns]
        faults = [f"{sequence_id} {fault.fault.name}" for sequence_id, fault in result.faults.items()]
        blocks = f"{result.blocks.free} of {result.blocks.total} blocks free"
        return [f"{executor} result {result.plan_id}: {', '.join(rows + faults) or 'no rows'}; {blocks}"]

    def do_deliver(self, executor: str = "x", stop: int | None = None, keep: int = 0) -> list[str]:
        """The oldest result on its way reaches the scheduler. `stop`: this sequence's text ends after `keep` of its tokens."""
        return self._effects(lambda: self.world.deliver(executor, {} if stop is None else {stop: TextStop(keep)}))

    def do_deliver_again(self, executor: str = "x") -> list[str]:
        result = self.world.last_results[executor]
        return self._effects(lambda: self.world.handle(ResultArrived(executor, result)))

    def do_turn(self, executor: str = "x", times: int = 1) -> list[str]:
        """Plan, step, deliver."""
        return self._effects(lambda: [self.world.turn(executor) for _ in range(times)])

    def do_lose(self, executor: str = "x") -> list[str]:
        return self._effects(lambda: self.world.lose(executor))

    def do_join(self, executor: str = "x") -> list[str]:
        return self._effects(lambda: self.world.rejoin(executor))

    def do_inject(self, seed: str, fault: str, executor: str = "x") -> list[str]:
        self.world.executors[executor].inject[int(seed)] = SequenceFault[fault]
        return []

    def do_drain(self) -> list[str]:
        """On to the end; shows how each request ended."""
        self.world.drain()
        self.world.check_idle()
        return [f"{name}: {record.path}, {len(record.output)} tokens" for name, record in self.world.records.items()]

    def do_restart(self) -> list[str]:
        return self._effects(lambda: self.world.restart_scheduler())

    # ---- questions ----

    def do_why(self, request_id: str) -> list[str]:
        return [self.world.core.wait_reason(request_id) or "it does not wait"]

    def do_wakeup(self) -> list[str]:
        due_s = self.world.core.next_wakeup_s()
        return ["none" if due_s is None else f"in {due_s - self.world.now_s:g} s"]

    def do_figures(self) -> list[str]:
        core = self.world.core
        views = [f"{view.name}: {view.running} running, forecast {view.free_blocks} blocks" for view in core.executors()]
        counters = core.counters
        return [*views, f"preemptions {counters.preemptions}, stale {counters.stale_results}, no blocks {counters.no_blocks}"]

    def _effects(self, act: Callable[[], object]) -> list[str]:
        del self.world.effects[:]
        act()
        return [_effect(effect) for effect in self.world.effects] or ["nothing"]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _row(sequence_id: int, num_computed: int, num_sampled: int, finish: int) -> str:
    end = {0: "", 1: " STOP", 2: " LENGTH"}[finish]
    return f"{sequence_id} computed {num_computed} sampled {num_sampled}{end}"


def _effect(effect: Effect) -> str:
    match effect:
        case PlanIssued():
            return f"{effect.executor} {_plan(effect.plan)}"
        case TokensGenerated():
            spans = zip(effect.request_ids, effect.first_indexes, effect.counts, strict=True)
            return "tokens " + ", ".join(f"{request_id}[{first}:{first + count}]" for request_id, first, count in spans)
        case Transitioned():
            return _transition(effect)
        case Updated():
            return f"updated {effect.request_id}"
        case OverloadChanged():
            return f"overload stage {effect.before} → {effect.after}" + (f": {effect.why}" if effect.why else "")


def _transition(effect: Transitioned) -> str:
    end = f" ({effect.finish_reason})" if effect.finish_reason else ""
    executor = f"on {effect.executor}" if effect.executor else ""
    error = f"{effect.error_code}: {effect.error}" if effect.error else ""
    notes = [note for note in (executor, effect.reason, error) if note]
    return "; ".join([f"{effect.request_id} {effect.before} → {effect.after}{end}", *notes])


def _plan(plan: Plan) -> str:
    parts = []
    if plan.release:
        parts.append(f"release {', '.join(map(str, plan.release))}")
    if plan.admit:
        parts.append("admit " + ", ".join(f"{a.sequence_id} = r{a.sampling.seed} of {len(a.token_ids)} tokens" for a in plan.admit))
    if plan.advance_sequence_ids:
        steps = zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True)
        parts.append("advance " + ", ".join(f"{sequence_id} by {count}" for sequence_id, count in steps))
    return f"plan {plan.plan_id}: " + "; ".join(parts)


def main() -> None:
    for path in sorted(TRACES.glob("*.txt")):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
