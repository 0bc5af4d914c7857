"""Flags and environment; an operator's mistake gets one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenmill_scheduler.__main__ import main
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.flags import DEFAULT_EXECUTOR, DEFAULT_LISTEN
from tokenmill_scheduler.settings import parse_settings
from tokenmill_service.flags import SettingsError


def test_the_defaults() -> None:
    settings = parse_settings([], {})
    assert settings.listen == DEFAULT_LISTEN
    assert settings.executors == (DEFAULT_EXECUTOR,)
    assert settings.database == "sqlite:///tokenmill.db"
    assert settings.durability == "power"
    assert settings.queue_limits == QueueLimits(10_000)
    assert settings.scheduler.batching == "continuous"


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {"TOKENMILL_MAX_NUM_SEQS": "none"}, "TOKENMILL_MAX_NUM_SEQS: 'none' is not a whole number of at least 1"),
        ([], {"TOKENMILL_POLICY": "none"}, "TOKENMILL_POLICY: invalid choice: 'none'"),
        (["--max-num-seqs", "0"], {"TOKENMILL_MAX_NUM_SEQS": "none"}, "argument --max-num-seqs: '0' is not"),
    ],
)
def test_a_mistake_is_named_as_it_was_given(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv, environ)
    assert str(caught.value).startswith(message)


def test_flags_win_over_the_environment() -> None:
    environ = {"TOKENMILL_MAX_NUM_SEQS": "4", "TOKENMILL_BATCHING": "static", "TOKENMILL_PORT_FILE": "here"}
    settings = parse_settings(["--max-num-seqs", "8"], environ)
    assert settings.scheduler.max_num_seqs == 8
    assert settings.scheduler.batching == "static"
    assert settings.port_file == Path("here")


def test_a_lane_that_is_not_named_keeps_its_share() -> None:
    assert parse_settings(["--lane-shares", "standard=20,batch=30"], {}).scheduler.lane_shares == (50, 20, 30)
    assert parse_settings(["--lane-shares", "real_time=0"], {}).scheduler.lane_shares == (0, 40, 10)


def test_several_executors() -> None:
    environ = {"TOKENMILL_EXECUTOR": "a:1, unix:b.sock"}
    assert parse_settings([], environ).executors == ("a:1", "unix:b.sock")
    assert parse_settings(["--executor", "c:3", "--executor=d:4"], environ).executors == ("c:3", "d:4")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--listen", "7600"], "--listen 7600 is neither HOST:PORT nor unix:PATH"),
        (["--listen", "h:70000"], "--listen h:70000 is neither HOST:PORT nor unix:PATH"),
        (["--listen", "unix:"], "unix: needs a path"),
        (["--executor", "x"], "--executor x is neither HOST:PORT nor unix:PATH"),
        (["--executor", "a:1", "--executor", "a:1"], "--executor a:1 is given twice"),
        (["--max-num-seqs", "0"], "'0' is not a whole number of at least 1"),
        (["--max-num-seqs", "100", "--max-num-batched-tokens", "50"], "raise the one or lower the other"),
        (["--step-timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--grace-period", "nan"], "'nan' is not a number of seconds of at least 0"),
        (["--watermark", "1"], "'1' is not at least 0 and below 1"),
        (["--max-message-bytes", "4GiB"], "more than gRPC can carry"),
        (["--max-message-bytes", "1"], "'1' is too little for a message with a prompt"),
        (["--max-message-bytes", "much"], "'much' is not a size such as 2GiB or 64MiB"),
        (["--lane-shares", "batch=20"], "come to 100 per cent at most, not real_time=50,standard=40,batch=20"),
        (["--policy", "random"], "invalid choice: 'random'"),
        (["--durability", "none"], "invalid choice: 'none'"),
        (["--lease-time", "0"], "'0' is not a number of seconds above 0"),
        (["--scheduler-name", "a\tb"], "a name has at most 200 characters, all of them printable"),
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_a_mistake_gets_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as mistake:
        parse_settings(argv, {})
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_mistake_ends_the_process_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-num-seqs", "none"]) == 2
    assert capsys.readouterr().err.startswith("tokenmill_scheduler: argument --max-num-seqs")
