"""Does the simulator foretell the real service? The same arrivals on both: throughput and median latencies side by side.

    python -m benchmarks.prediction [--model smollm2-135m-instruct] [--trace FILE[:LENGTHS] ...] [--repeat 1] [executor flags ...]

One service is measured all along while it writes its plan journal. Calibrations and loads take turns: a calibration has decodes of
each number, and prompts of 8 to 4,096 tokens that come while others decode. It tells the cost of a step, what the service adds to a
request on a machine that is at work, and how early plans are asked for; none of that is foretold. A load is foretold with the
calibrations on both sides of it, for a machine's speed drifts within minutes; by how much it did in between is in the table. With
`--repeat` all loads are run again, minutes later: what is foretold of the runs of a load is laid beside their middle, and each run
beside that, which says what the service itself varies by.

Loads are a burst, the same requests and more as a Poisson process, and the first requests of recorded traces, their lengths times a
factor. Those with arrivals of their own come at 70 % of the rate at which the simulator could serve them. Latencies are those that
the client sees. Writes a table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tokenmill_cli.bench.session import scheduler as connected
from tokenmill_client import AsyncClient
from tokenmill_service.logs import configure_logs
from tokenmill_simulator.compare import Machines
from tokenmill_simulator.fit import Fit
from tokenmill_workloads import Arrival, burst, poisson, read_trace, scale_lengths

from benchmarks.bare import TOKEN_BUDGET
from benchmarks.prediction import outcomes
from benchmarks.prediction.foretelling import Recorded
from benchmarks.prediction.measuring import CALIBRATING, SEED, WARM_UP, WARMING_UP, Measurer
from benchmarks.prediction.outcomes import Medians, Outcome, by_request
from benchmarks.tables import keep, today
from tests.fakes.processes import Processes, wait_serving

SLOTS = 8
LOAD = 0.7
# The journal's writer looks every 0.1 s.
JOURNAL_LAG_S = 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a load. `drift`: how much longer the same steps took after it than before. `steps`: its own steps, what they were
    foretold to take together over what they took. `at_its_speed`: foretold with all steps longer or shorter by that factor."""

    name: str
    foretold: Outcome
    at_its_speed: Outcome
    measured: Outcome
    drift: float
    steps: float


# ---- measured ------------------------------------------------------------------------------------------------------------------


def loads(options: argparse.Namespace) -> Iterator[tuple[str, tuple[Arrival, ...]]]:
    """Those whose arrivals spread over time have still to be brought to a rate."""
    yield "burst", burst(seed=SEED)
    yield f"Poisson, {options.requests} requests", poisson(burst(options.requests, seed=SEED), 1.0, SEED)
    for trace, length_scale in options.trace:
        recorded = scale_lengths(read_trace(trace, limit=options.requests), length_scale)
        yield f"{trace.name}, {len(recorded)} requests, lengths × {length_scale:g}", recorded


async def measure_all(address: str, journal: Path, options: argparse.Namespace) -> Recorded:
    """Each load stands between two calibrations."""
    async with connected(AsyncClient(address), "") as server:
        measurer = Measurer(server)
        await measurer.measure(WARMING_UP, WARM_UP)
        await measurer.calibrate()
        await asyncio.sleep(JOURNAL_LAG_S)
        first = Recorded(journal, measurer.phases, server.vocab_size)
        for name, arrivals in [*loads(options)] * options.repeat:
            await measurer.measure(name, first.at_load(arrivals, LOAD))
            await measurer.calibrate()
        await asyncio.sleep(JOURNAL_LAG_S)
        return Recorded(journal, measurer.phases, server.vocab_size)


def record(options: argparse.Namespace, executor_flags: Sequence[str]) -> Recorded:
    """All loads on a service started for them."""
    with Processes() as processes:
        executor = processes.executor("--model", options.model, "--threads", str(os.cpu_count()), *executor_flags).address
        journal = processes.folder / "journal"
        limits = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(TOKEN_BUDGET), "--no-overload-control")
        address = processes.scheduler(executor, flags=(*limits, "--plan-journal", str(journal))).address
        asyncio.run(wait_serving(address))
        return asyncio.run(measure_all(address, journal, options))


# ---- compared ------------------------------------------------------------------------------------------------------------------


def compare(recorded: Recorded) -> list[Compared]:
    return [_compared(recorded, place) for place, phase in enumerate(recorded.phases) if phase.is_load]


def _compared(recorded: Recorded, place: int) -> Compared:
    phase, before, after = recorded.phases[place], place - 1, place + 1
    machines = recorded.machines([before, after])
    foretold, at_its_speed = (
        outcomes.foretold(recorded.run(phase.arrivals, on, phase.seed), on.service)
        for on in (machines, recorded.as_fast_as(place, machines))
    )
    drift = recorded.steps_share(before, machines) / recorded.steps_share(after, machines) - 1
    steps = recorded.steps_share(place, machines)
    measured = outcomes.measured(phase.run, recorded.client_s(place))
    return Compared(phase.name, foretold, at_its_speed, measured, drift, steps)


# ---- shown ---------------------------------------------------------------------------------------------------------------------


def table(model: str, recorded: Recorded) -> str:
    calibrations = [place for place, phase in enumerate(recorded.phases) if phase.name == CALIBRATING]
    in_words = _in_words(recorded.fit(calibrations), recorded.machines(calibrations))
    lines = [
        f"# Simulator against the real executor, {model}, {today()}",
        "",
        f"`python -m benchmarks.prediction`; {os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the "
        f"end; {SLOTS} slots. {in_words} Foretold / measured (bar: within 10 %); latencies are medians, and where a load was run "
        "several times both are the middle of its runs, which follow with how far each was from it. Request by request: the median "
        "of what was foretold of each over what was measured of it. Beside the core: of the time to first token, what no queue and "
        "no step took. Drift: how much longer a calibration's steps took after the run than before. Steps: the run's own, as "
        "foretold / as measured; the last row of a load is foretold with all steps longer or shorter by that much, for a machine "
        "as fast as it was then.",
        "",
        "| arrivals | tokens/s | first token ms | per output token ms | end-to-end ms | beside the core ms | drift | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    compared = compare(recorded)
    for name in dict.fromkeys(one.name for one in compared):
        lines += _rows(name, [one for one in compared if one.name == name])
    return "\n".join([*lines, ""])


def _rows(name: str, runs: Sequence[Compared]) -> Iterator[str]:
    each = [run.measured.medians() for run in runs]
    middle = Medians.middle(each)
    yield f"| {name} | {_cells([run.foretold for run in runs], middle)} | | |"
    ratios = by_request([(run.foretold, run.measured) for run in runs])
    yield f"| – request by request | | {' | '.join(_off(ratio, 1.0) for ratio in ratios)} | | | |"
    for number, (run, medians) in enumerate(zip(runs, each, strict=True), 1):
        cells = [f"{value:,.1f} ({_off(value, was)})" for value, was in zip(astuple(medians), astuple(middle), strict=True)]
        yield f"| – run {number} | {' | '.join(cells)} | {run.drift:+.1%} | {_off(run.steps, 1.0)} |"
    yield f"| – at the speed of then | {_cells([run.at_its_speed for run in runs], middle)} | | |"


def _cells(foretold: Sequence[Outcome], measured: Medians) -> str:
    middle = Medians.middle(outcome.medians() for outcome in foretold)
    pairs = zip(astuple(middle), astuple(measured), strict=True)
    return " | ".join(f"{value:,.1f} / {was:,.1f} ({_off(value, was)})" for value, was in pairs)


def _off(value: float, true: float) -> str:
    return f"{value / true - 1:+.1%}"


def _in_words(fitted: Fit, machines: Machines) -> str:
    cost, service = fitted.cost, machines.service
    return (
        f"By all calibrations a step takes {cost.step_s * 1e3:.1f} ms + max({cost.weights_s * 1e3:.1f} ms, rows × "
        f"{cost.row_s * 1e3:.2f} ms) + decodes × {cost.decode_s * 1e3:.2f} ms + KV tokens × {cost.kv_token_s * 1e6:.2f} µs + pairs "
        f"× {cost.pair_s * 1e6:.2f} µs + chunks × {cost.chunk_s * 1e3:.1f} ms, {fitted.error:.1%} off a step (root of the mean "
        f"square; {fitted.outliers} of {fitted.steps:,} are left out); the service adds {service.client_s * 1e3:.1f} ms to a "
        f"request and {service.link_s * 2e3:.1f} ms to a plan, and asks for one {service.lead_s * 1e3:.1f} ms ahead, behind a "
        f"prompt {service.prefill_lead:.0%} of its step."
    )


def _trace(word: str) -> tuple[Path, float]:
    file, _, scale = word.rpartition(":")
    return (Path(file), float(scale)) if file else (Path(word), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--trace", type=_trace, action="append", default=[], help="a recorded trace, and a factor for its lengths")
    parser.add_argument("--requests", type=int, default=60, help="of the Poisson process and of each trace")
    parser.add_argument("--repeat", type=int, default=1, help="of all loads, one after the other")
    options, executor_flags = parser.parse_known_args()
    configure_logs("console", "warning")
    name = Path(options.model).stem
    report = table(name, record(options, executor_flags))
    keep(f"prediction-{name}", report)


if __name__ == "__main__":
    main()
