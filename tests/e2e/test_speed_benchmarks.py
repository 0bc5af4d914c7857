"""The benchmarks of the whole service stay runnable: small, on the simulated model. What they measure is not looked at."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from tokenmill_executor.loading import Loader
from tokenmill_executor.settings import parse_settings
from tokenmill_executor.simulated_tokenizer import VOCAB_SIZE
from tokenmill_workloads import prompts

from benchmarks.bare import BareLoop, Job
from benchmarks.prediction import __main__ as prediction
from benchmarks.prediction import measuring
from benchmarks.speed import peers
from benchmarks.speed.measure import measure
from benchmarks.speed.peers.peer import PeerError, Send, failure
from benchmarks.speed.plot import draw
from benchmarks.speed.table import table
from benchmarks.speed.workloads import WORKLOADS, Measured, Run
from tests.fakes.calls import foretold


def test_the_service_is_measured_beside_the_bare_engine() -> None:
    chosen = [workload for workload in WORKLOADS if workload.name in ("W4", "W5")]
    measured = list(measure("simulated", "bf16", chosen, repeat=1, length_scale=0.1))
    for one in measured:
        (service,), (bare,) = one.service, one.bare
        assert service.output_tokens == bare.output_tokens == sum(a.output_tokens for a in one.workload.arrivals(0.1))
        assert service.cpu_ms.keys() == {"executor", "scheduler", "client"}
        assert service.tokens_per_s > 0
    report = table("simulated", 1, 0.1, measured, [peers.PeerMeasured("another", "does not run here: no compiler")])
    rows = [line for line in report.splitlines() if line.startswith(("| W4", "| W5"))]
    assert len(rows) == 6  # tokens a second, CPU time, peers
    assert "- another: does not run here: no compiler" in report


def test_every_server_has_a_bar_on_every_workload(tmp_path: Path) -> None:
    chosen = WORKLOADS[:2]
    measured = [Measured(workload, "bf16", [Run(1_200, 1), Run(1_300, 1), Run(9_000, 1)]) for workload in chosen]
    draw("title", measured, [peers.PeerMeasured("another", "does not run here: no compiler")], tmp_path / "first.svg")
    draw("title", measured, [peers.PeerMeasured("another", "does not run here: no compiler")], tmp_path / "again.svg")
    picture = (tmp_path / "first.svg").read_text()
    assert picture.count(">1,300</text>") == picture.count(">–</text>") == len(chosen)
    assert picture.count(">another</text>") == picture.count(">tokenmill bf16</text>") == 1
    assert picture == (tmp_path / "again.svg").read_text()


def test_the_bare_loop_makes_the_right_tokens_with_and_without_a_prefix_cache() -> None:
    """Tokens of a prompt that are cached are not planned again, and none is left out."""
    (shared,) = [workload for workload in WORKLOADS if workload.fixed == "shared-prefix"]
    arrivals = shared.arrivals(0.5)
    jobs = [Job(prompt, arrival.output_tokens, 1) for arrival, prompt in zip(arrivals, prompts(arrivals, VOCAB_SIZE), strict=True)]
    expected = [foretold(job.prompt, job.max_tokens) for job in jobs]
    for flag in ("--enable-prefix-caching", "--no-enable-prefix-caching"):
        costs = ["--simulated-step-ms", "0", "--simulated-prefill-token-us", "0", "--simulated-decode-token-us", "0"]
        engine = Loader(parse_settings(["--model", "simulated", flag, *costs], {})).load()
        assert BareLoop(engine, jobs, slots=4).run() == expected
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        BareLoop(engine, [Job([VOCAB_SIZE], 1, 1)], slots=4).run()


def test_a_peer_that_does_not_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        name = "missing"
        how = ""

        def install(self) -> None:
            raise PeerError("no such package")

        def serving(self, slots: int) -> AbstractContextManager[Send]:
            raise NotImplementedError

    monkeypatch.setattr(peers, "PEERS", {"missing": lambda folder: Missing()})
    measured = peers.measure_peer("missing", tmp_path, WORKLOADS, 1, 1.0)
    assert (measured.how, measured.runs) == ("does not run here: no such package", {})


def test_a_prediction_is_laid_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "calibration", partial(measuring.calibration, 3))
    options = argparse.Namespace(model="simulated", trace=[], requests=4, repeat=2)
    costs = ["--simulated-step-ms", "2", "--simulated-prefill-token-us", "10", "--simulated-decode-token-us", "100"]
    recorded = prediction.record(options, costs)
    found = prediction.compare(recorded)
    assert [one.name for one in found] == ["burst", "Poisson, 4 requests"] * 2
    for one in found:
        assert one.foretold.latencies.shape == one.measured.latencies.shape
        assert one.foretold.output_tokens_per_s > 0
        assert one.measured.medians().latency > one.measured.medians().time_to_first_token > 0
    rows = [
        line for line in prediction.table("simulated", recorded).splitlines() if line.startswith(("| burst", "| –", "| Poisson"))
    ]
    assert len(rows) == 2 * 5  # foretold, request by request, two runs, at their speed


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            "  error: subprocess-exited-with-error\n\n  × Building wheel did not run\n"
            "      CMake Error at CMakeLists.txt:2 (project):\n"
            "        No CMAKE_CXX_COMPILER could be found.\n\n      error: command 'cmake' failed\nERROR: Failed building wheel",
            "CMake Error at CMakeLists.txt:2 (project): No CMAKE_CXX_COMPILER could be found.",
        ),
        (
            "  note: of no use\n  /src/a.cpp:3:10: fatal error: b.h: No such file\nERROR: Failed",
            "/src/a.cpp:3:10: fatal error: b.h: No such file",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for x\n",
            "ERROR: No matching distribution found for x",
        ),
        ("", "no reason given"),
    ],
    ids=["cmake", "compiler", "pip", "nothing"],
)
def test_a_server_that_cannot_be_built_says_why_in_one_line(told: str, reason: str) -> None:
    assert failure(told) == reason
