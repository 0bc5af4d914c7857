"""`tokenmill simulate`: from options to tables, documents and pictures. Needs no server."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from tokenmill_cli.exits import ExitCode
from tokenmill_cli.main import main
from tokenmill_scheduler.core.policy import POLICIES

TRACE = Path(__file__).parents[2] / "golden" / "simulation" / "azure_conversation_excerpt.csv"


def simulate(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["simulate", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code, out, err = simulate(capsys, *argv, "--output", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_burst_under_static_and_continuous_batching(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, "--max-num-seqs", "8", "--compare", "static,continuous")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "burst: 20 requests on 1 × a100-8b"
    assert lines[3].split() == ["static", "continuous"]
    assert {line.split("  ")[0] for line in lines[4:]} >= {"output tokens/s", "time to first token p99", "batch occupancy"}


def test_continuous_batching_beats_static_at_equal_slots(capsys: pytest.CaptureFixture[str]) -> None:
    static, continuous = document(capsys, "--max-num-seqs", "8", "--compare", "static,continuous")["runs"]
    ratio = continuous["figures"]["output_tokens_per_s"] / static["figures"]["output_tokens_per_s"]
    assert ratio > 1.5
    assert static["config"]["batching"] == "static"


def test_every_policy_of_the_core_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    runs = document(capsys, "--trace", str(TRACE), "--compare", ",".join(POLICIES), "--lanes", "20,60,20", "--tenants", "3")["runs"]
    assert [run["config"]["policy"] for run in runs] == list(POLICIES)
    assert {run["figures"]["output_tokens"] for run in runs} == {runs[0]["figures"]["output_tokens"]}
    assert set(runs[0]["figures"]["lanes"]) == {"real_time", "standard", "batch"}


def test_options_shape_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--trace", str(TRACE), "--compare", "fcfs")
    as_recorded, dense, short, first = (
        document(capsys, *common, *more)["runs"][0]["figures"]
        for more in ([], ["--scale", "4"], ["--length-scale", "0.1"], ["--limit", "10"])
    )
    assert dense["wall_s"] < as_recorded["wall_s"]
    assert short["output_tokens"] < as_recorded["output_tokens"] / 8
    assert first["requests"] == 10


def test_host_memory_keeps_what_the_device_has_no_room_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Thirty prompts of 40 blocks, each twice, are 1,200 blocks; the device has 833."""
    trace = tmp_path / "twice.jsonl"
    prompts = [list(range(40 * number, 40 * number + 40)) for number in range(30)] * 2
    rows = [
        {"timestamp": 3_000 * place, "input_length": 40 * 512, "output_length": 2, "hash_ids": hash_ids}
        for place, hash_ids in enumerate(prompts)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    common = ("--trace", str(trace), "--preset", "h100-8b", "--compare", "lpm")
    without, with_host = (
        document(capsys, *common, "--kv-offloading-size", size)["runs"][0]["figures"]["prefix_hit_share"] for size in ("0", "30")
    )
    assert without == 0
    assert with_host == pytest.approx(39 / 80)


def test_host_memory_of_a_machine_whose_copies_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = simulate(capsys, "--preset", "cpu-smollm2-bf16", "--kv-offloading-size", "1")
    assert code == ExitCode.USAGE
    assert "--kv-offloading-size: what cpu-smollm2-bf16 takes" in err


def test_settings_of_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    run = document(capsys, "--set", "watermark=0.2", "--compare", "fcfs:4")["runs"][0]
    assert (run["config"]["watermark"], run["config"]["max_num_seqs"]) == (0.2, 4)


def test_parts_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Lanes, tenants and the overload, for all candidates or for one; what is not named stays."""
    lanes = ("--set", "lane_shares.real_time=30", "--set", "lane_shares.batch=20")
    runs = document(capsys, *lanes, "--compare", "fcfs,fcfs+fair_share=yes+weights.tenant-1=3.5+overload.queue_delay_s=5")["runs"]
    common, own = (run["config"] for run in runs)
    assert common["lane_shares"] == own["lane_shares"] == [30, 40, 20]
    assert (common["weights"], own["weights"]) == ({}, {"tenant-1": 3.5})
    assert (common["overload"]["queue_delay_s"], own["overload"]["queue_delay_s"]) == (60.0, 5.0)


def test_weights_and_guarantees_change_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """The real-time lane's first tokens come later when half of the slots are the batch lane's."""
    load = ("--count", "200", "--lanes", "60,0,40", "--max-num-seqs", "4", "--set", "overload.enabled=no")
    none, half = (
        document(capsys, *load, "--compare", f"fcfs+lane_shares.real_time=0+lane_shares.standard=0+lane_shares.batch={share}")
        for share in (0, 50)
    )
    first, later = (found["runs"][0]["figures"]["lanes"]["real_time"]["p50"] for found in (none, half))
    assert later > 1.3 * first


def test_who_is_refused_at_submit_is_counted_and_may_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty at once, five may wait: those that come again, after as long as they are told, are all served."""
    load = ("--max-num-seqs", "2", "--max-queue-len", "5", "--compare", "fcfs")
    once, again = (document(capsys, *load, *more)["runs"][0]["figures"] for more in ([], ["--retries", "100"]))
    assert (once["refused"], once["refusals"], once["not_done"]) == (15, 15, 15)
    assert (again["refused"], again["not_done"]) == (0, 0)
    assert again["refusals"] > 15
    _, table, _ = simulate(capsys, *load)
    assert "refused at submit" in table


def test_a_candidate_can_have_settings_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    runs = document(capsys, "--compare", "fcfs+watermark=0.3+max_overtakes=2:5,fcfs")["runs"]
    assert [run["name"] for run in runs] == ["fcfs+watermark=0.3+max_overtakes=2:5", "fcfs"]
    own, common = (run["config"] for run in runs)
    assert (own["watermark"], own["max_overtakes"], own["max_num_seqs"]) == (0.3, 2, 5)
    assert (common["watermark"], common["max_num_seqs"]) == (0.01, 256)


def test_what_a_trace_does_not_say_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the burst may not wait long: those end as expired, the others do not."""
    argv = (
        "--max-num-seqs",
        "2",
        "--deadline",
        "0.5",
        "--deadline",
        "600",
        "--priority",
        "1",
        "--priority",
        "5",
        "--compare",
        "fcfs",
    )
    first, again, other = (document(capsys, *argv, *seed)["runs"][0]["figures"] for seed in ([], [], ["--seed", "8"]))
    assert 0 < first["not_done"] < 20
    assert first == again
    assert first != other


def test_a_table_of_presets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, "--preset", "list")
    assert code == 0
    assert out.startswith("cpu-smollm2-bf16")


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = document(capsys, "--max-num-seqs", "8", "--plots", str(tmp_path / "plots"))["plots"]
    assert [Path(file).name for file in files] == ["occupancy.png", "queue.png", "latency.png"]
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--compare", "nope"], "'nope' is none of fcfs"),
        (["--compare", "static:x"], "a number of slots"),
        (["--preset", "abacus"], "no preset 'abacus'"),
        (["--set", "color=red"], "--set: 'color=red': there is no such setting; settings are max_num_seqs"),
        (["--set", "watermark=high"], "--set: 'watermark=high': it is a number"),
        (["--set", "fair_share=maybe"], "it is yes or no"),
        (["--set", "admission=never"], "it is one of optimistic, never-evict, expected-length"),
        (["--set", "lane_shares=50"], "lane_shares.LANE, weights.TENANT, overload.enabled"),
        (["--set", "lane_shares.bulk=50"], "'bulk' is no lane; lanes are real_time, standard, batch"),
        (["--set", "lane_shares.batch=1.5"], "it is a whole number"),
        (["--set", "lane_shares.batch=50"], "--set: lane_shares.LANE: lane shares are whole numbers"),
        (["--set", "weights.ann=0"], "--set: 'weights.ann=0': a weight is above 0"),
        (["--set", "overload.queue=1"], "'queue' is none of enabled, ttft_target_s"),
        (["--compare", "fcfs+color=red"], "--compare: 'color=red': there is no such setting"),
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--poisson"], "--poisson needs a --rate"),
        (["--prompt-tokens", "9-1"], "not a range"),
        (["--lanes", "1,2"], "not three shares"),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "raise the one or lower the other"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulate(capsys, *argv)
    assert (code, out) == (ExitCode.USAGE, "")
    assert words in err


def test_without_numpy_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_numpy(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tokenmill_simulator"):
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_numpy)
    code, _, err = simulate(capsys)
    assert (code, "pip install 'tokenmill[simulator]'" in err) == (ExitCode.FAILURE, True)
