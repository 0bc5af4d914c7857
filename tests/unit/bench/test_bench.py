"""Figures, files, comparisons and the command itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenmill_cli.bench.figures import Percentiles, figures, percentile
from tokenmill_cli.bench.measurements import Measurement, read, save
from tokenmill_cli.bench.runner import RequestTiming, WorkloadRun
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.main import main

from tests.unit.bench.openai_server import OpenAiServer
from tests.unit.client.fake_server import FakeServer

RUN = WorkloadRun(
    wall_s=2.0,
    timings=(RequestTiming(5, 0.0, 1.0, (0.5, 1.0), (1, 9)), RequestTiming(15, 0.0, 2.0, (1.0, 1.25, 2.0), (1, 1, 8))),
    batch_occupancy=0.5,
    slots=8,
    occupancy=((0.0, 2), (1.0, 1)),
    client_cpu_s=0.02,
)
MEASURED = Measurement("", "127.0.0.1:7600", "oracle", "burst", None, 42, "2026-01-02T03:04:05+00:00", "2 cores", (RUN,))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    monkeypatch.setenv("TOKENMILL_SERVER", server.address)
    yield server
    server.stop()


def test_figures_of_one_run() -> None:
    found = figures([RUN])
    assert (found.output_tokens_per_s, found.total_tokens_per_s, found.requests_per_s) == (10.0, 20.0, 1.0)
    assert found.time_to_first_token == Percentiles(0.5, 1.0, 1.0)
    assert found.inter_token_latency == Percentiles(0.5, 0.75, 0.75)
    assert found.time_per_output_token == Percentiles(0.5 / 9, 1.0 / 9, 1.0 / 9)
    assert found.latency == Percentiles(1.0, 2.0, 2.0)
    assert found.client_cpu_ms_per_output_token == 1.0
    assert (found.completed, found.failed, found.batch_occupancy) == (2, 0, 0.5)


def test_figures_are_medians_over_runs() -> None:
    runs = [replace(RUN, wall_s=wall_s, failures=failures) for wall_s, failures in ((1.0, ()), (2.0, ("a",)), (10.0, ("a", "b")))]
    found = figures(runs)
    assert (found.output_tokens_per_s, found.wall_s, found.failed) == (10.0, 2.0, 3)


def test_what_was_not_measured_has_no_figure() -> None:
    found = figures([WorkloadRun(1.0, (), failures=("full",))])
    assert (found.output_tokens_per_s, found.time_to_first_token, found.batch_occupancy) == (0.0, None, None)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.5) == 50.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_measurement_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(MEASURED, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == MEASURED


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}', '{"format": "tokenmill-bench-1", "runs": [1]}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(CommandError, match="is not what"):
        read(tmp_path / "a.json")


def test_a_fixed_workload_is_run_shown_and_saved(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    options = ["--limit", "3", "--length-scale", "0.1", "--repeat", "2", "--save", str(path), "--label", "now"]
    assert main(["bench", "decode-heavy", *options]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "decode-heavy" in shown
    assert "time to first token" in shown
    measured = read(path)
    assert (measured.label, measured.workload, measured.model) == ("now", "decode-heavy", "oracle")
    assert [[timing.output_tokens for timing in run.timings] for run in measured.runs] == [[13, 13, 13]] * 2
    # A warm-up, then twice three, and no prompt twice.
    prompts = [tuple(request.spec.prompt.token_ids.ids) for request in server.requests.values()]
    assert len(set(prompts)) == len(prompts) == 7


def test_a_trace_is_sent_at_a_rate(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t,in,out\n0,5,2\n60,6,3\n120,7,4\n")
    columns = ["--columns", "t", "in", "out"]
    saved = str(tmp_path / "a.json")
    argv = ["bench", "trace", str(trace), *columns, "--rate", "20", "--warmup", "0", "--save", saved, "--json"]
    assert main(argv) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["completed"] == 3
    timings = read(tmp_path / "a.json").runs[0].timings
    assert [(timing.prompt_tokens, timing.output_tokens) for timing in timings] == [(5, 2), (6, 3), (7, 4)]
    assert [timing.sent_s >= at_s for timing, at_s in zip(timings, (0.0, 0.05, 0.1), strict=True)] == [True] * 3


def test_requests_longer_than_the_model_takes_are_not_sent(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill-heavy", "--length-scale", "4"]) == ExitCode.FAILURE
    assert "--length-scale 0." in capsys.readouterr().err
    assert not server.requests


def test_failures_are_counted_and_end_in_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAiServer() as server:
        server.stop_after = 3
        argv = ["bench", "decode-heavy", "--limit", "2", "--warmup", "0", "--base-url", server.base_url]
        assert main(argv) == ExitCode.FAILURE
    out, err = capsys.readouterr()
    assert "failed requests" in out
    assert "2 × 128 tokens were asked for, 4 came" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trace", "{folder}/none"], "cannot be read"),
        (["trace", "{folder}/empty"], "has no requests"),
        (["trace", "{folder}/strange"], "no trace format has the columns"),
        (["trace", "{folder}/one", "--poisson"], "--poisson needs a --rate"),
        (["compare", "{folder}/empty"], "is not what"),
        (["burst", "--model", "other"], "has the models oracle"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "strange").write_text("a,b\n1,2\n")
    (tmp_path / "one").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")
    assert main(["bench", *(word.format(folder=tmp_path) for word in argv)]) != ExitCode.OK
    assert message in capsys.readouterr().err


def test_measurements_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = replace(MEASURED, label="twice", runs=(replace(RUN, wall_s=1.0),))
    save(MEASURED, tmp_path / "before.json")
    save(twice, tmp_path / "after.json")
    files = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    assert main(["bench", "compare", *files, "--plots", str(tmp_path / "plots")]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["before", "twice"]
    assert out.splitlines()[2].split()[-1] == "2.00×"
    assert err.splitlines() == [str(tmp_path / "plots" / f"{name}.png") for name in ("throughput", "latency", "occupancy")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())
