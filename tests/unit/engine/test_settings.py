"""Flags and environment, the number of blocks, addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenmill_executor.loading import Loader, count_blocks, count_host_blocks, make_hasher
from tokenmill_executor.settings import parse_settings, resolve_model
from tokenmill_service.address import bound_address, check_address, default_name, lock_address, write_port_file
from tokenmill_service.flags import SettingsError

from tests.fakes.runner import OracleRunner

MODEL = ["--model", "simulated"]


def test_defaults() -> None:
    settings = parse_settings(MODEL, {})
    assert (settings.listen, settings.block_size, settings.max_num_seqs) == ("127.0.0.1:7601", 16, 256)
    assert (settings.max_num_batched_tokens, settings.pipeline_depth) == (8192, 2)
    assert settings.max_message_bytes == 64 << 20
    assert settings.kv_cache_memory_bytes is None


def test_prefix_caching_is_on_unless_a_flag_or_the_environment_says_otherwise() -> None:
    name = "TOKENMILL_ENABLE_PREFIX_CACHING"
    assert parse_settings(["--model=simulated"], {}).enable_prefix_caching
    assert not parse_settings(["--model=simulated"], {name: "false"}).enable_prefix_caching
    assert parse_settings(["--model=simulated", "--enable-prefix-caching"], {name: "0"}).enable_prefix_caching
    assert not parse_settings(["--model=simulated", "--no-enable-prefix-caching"], {name: "TRUE"}).enable_prefix_caching
    with pytest.raises(SettingsError, match="TOKENMILL_ENABLE_PREFIX_CACHING is 'perhaps': say true or false"):
        parse_settings(["--model=simulated"], {name: "perhaps"})


def test_every_flag_is_an_environment_variable_and_the_flag_wins() -> None:
    environ = {"TOKENMILL_MODEL": "simulated", "TOKENMILL_MAX_NUM_SEQS": "7", "TOKENMILL_SIMULATED_STEP_MS": "2.5"}
    settings = parse_settings(["--max-num-seqs", "9"], environ)
    assert (settings.max_num_seqs, settings.simulated.step_ms) == (9, 2.5)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5KB", 1500), ("77", 77), ("3g", None), ("0", None)]
)
def test_sizes_have_units(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(SettingsError, match=r"--kv-cache-memory-bytes: .* is not a size such as 2GiB"):
            parse_settings([*MODEL, f"--kv-cache-memory-bytes={text}"], {})
    else:
        assert parse_settings([*MODEL, f"--kv-cache-memory-bytes={text}"], {}).kv_cache_memory_bytes == size


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model"),
        (["--model", "no-such-model"], "tokenmill models pull"),
        ([*MODEL, "--max-num-seqs=0"], "--max-num-seqs: '0' is not a whole number of at least 1"),
        ([*MODEL, "--block-size=x"], "--block-size"),
        ([*MODEL, "--gpu-memory-utilization=1.2"], "--gpu-memory-utilization: '1.2' is not above 0 and at most 1"),
        ([*MODEL, "--simulated-step-ms=nan"], "--simulated-step-ms"),
        ([*MODEL, "--dtype=float16"], "--dtype"),
        ([*MODEL, "--max-num"], "--max-num"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_flag(flags: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(flags, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_is_a_path_or_a_name_in_the_cache(tmp_path: Path) -> None:
    environ = {"TOKENMILL_CACHE": str(tmp_path)}
    gguf = tmp_path / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.touch()
    assert resolve_model("SmolLM2-135M-Instruct", environ) == str(gguf)
    assert resolve_model(str(gguf), {}) == str(gguf)
    folder = tmp_path / "models" / "tiny"
    folder.mkdir()
    assert resolve_model("tiny", environ) == str(folder)
    assert resolve_model("tiny", {"XDG_CACHE_HOME": str(tmp_path / "none"), "TOKENMILL_CACHE": str(tmp_path)}) == str(folder)
    with pytest.raises(SettingsError, match=f"no model in {tmp_path}/models: "):
        resolve_model("/no/such.gguf", {"TOKENMILL_CACHE": str(tmp_path)})


def test_blocks_are_what_the_memory_holds_but_no_more_than_can_be_used() -> None:
    """The runner has 100,000 bytes, a token takes 100 and a sequence has at most 64 tokens."""
    runner = OracleRunner()
    assert count_blocks(parse_settings([*MODEL, "--block-size=16"], {}), runner) == 62
    assert count_blocks(parse_settings([*MODEL, "--block-size=16", "--max-num-seqs=3"], {}), runner) == 12
    assert count_blocks(parse_settings([*MODEL, "--block-size=16", "--num-gpu-blocks-override=5"], {}), runner) == 5
    with pytest.raises(SettingsError, match="raise --kv-cache-memory-bytes"):
        count_blocks(parse_settings([*MODEL, "--block-size=1001"], {}), runner)


def test_a_model_that_cannot_be_loaded_is_an_operators_mistake(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        Loader(parse_settings(["--model", str(path)], {})).load()


# ---- addresses -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", ["127.0.0.1:0", "[::1]:7601", "localhost:65535", "unix:/run/x.sock"])
def test_good_addresses(good: str) -> None:
    assert check_address(good, "--listen") == good


@pytest.mark.parametrize("bad", ["unix:", "7601", "127.0.0.1", "host:", "host:65536", ":7601"])
def test_bad_addresses(bad: str) -> None:
    with pytest.raises(SettingsError, match="--listen"):
        check_address(bad, "--listen")


def test_names_and_bound_addresses() -> None:
    assert bound_address("127.0.0.1:0", 4242) == "127.0.0.1:4242"
    assert bound_address("unix:/run/x.sock", 1) == "unix:/run/x.sock"
    assert default_name("127.0.0.1:4242").endswith(":4242")
    assert default_name("unix:/run/x.sock").endswith(":/run/x.sock")


def test_a_unix_path_has_one_listener(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/x.sock"
    assert lock_address("127.0.0.1:0") is None
    assert lock_address(listen) is not None
    with pytest.raises(SettingsError, match="another process listens"):
        lock_address(listen)
    with pytest.raises(SettingsError, match="cannot be made"):
        lock_address(f"unix:{tmp_path}/missing/x.sock")


def test_the_port_file_holds_the_address(tmp_path: Path) -> None:
    write_port_file(tmp_path / "port", "127.0.0.1:4242")
    assert [path.name for path in tmp_path.iterdir()] == ["port"]
    assert (tmp_path / "port").read_text() == "127.0.0.1:4242"
    (tmp_path / "folder").mkdir()
    for impossible in ("folder", "missing/port", "port/port"):
        with pytest.raises(SettingsError, match=f"--port-file {tmp_path}/{impossible} cannot be written: "):
            write_port_file(tmp_path / impossible, "127.0.0.1:4242")


def test_host_memory_in_gib_becomes_blocks() -> None:
    runner = OracleRunner()

    def count(*flags: str) -> int:
        settings = parse_settings([*MODEL, "--block-size", "4", *flags], {})
        return count_host_blocks(settings, runner, make_hasher(settings, runner))

    assert count() == count("--kv-offloading-size", "0") == 0
    assert count("--kv-offloading-size", "0.5") == (1 << 29) // runner.block_bytes(4)
    with pytest.raises(SettingsError, match="holds no block of 400 bytes"):
        count("--kv-offloading-size", "1e-7")
    with pytest.raises(SettingsError, match="no prefix is cached"):
        count("--kv-offloading-size", "1", "--no-enable-prefix-caching")


def test_a_loaded_engine_has_the_host_tier_that_was_asked_for() -> None:
    settings = parse_settings([*MODEL, "--num-gpu-blocks-override", "8", "--kv-offloading-size", "0.01"], {})
    tier = Loader(settings).load().host_tier
    assert tier is not None
    assert tier.num_blocks == 5


class FullRunner(OracleRunner):
    """Of a device that has no room for the one or the other."""

    full: str = ""

    def available_bytes(self) -> int:
        return self._room("steps", super().available_bytes())

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._room("graphs", 0)
        super().allocate(num_blocks, block_size)

    def _room(self, what: str, found: int) -> int:
        if what == self.full:
            raise MemoryError(f"cuda:0 has no room for {what}")
        return found


@pytest.mark.parametrize(
    ("full", "advice"),
    [
        ("steps", "lower --max-num-batched-tokens or --max-num-seqs: cuda:0 has no room for steps"),
        (
            "graphs",
            "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --kv-offloading-size: cuda:0 has no room for graphs",
        ),
    ],
)
def test_a_device_without_room_is_a_matter_of_settings(full: str, advice: str) -> None:
    runner = FullRunner()
    runner.full = full
    with pytest.raises(SettingsError, match=advice):
        Loader(parse_settings(MODEL, {}), lambda _: runner).load()


def test_eager_steps_are_asked_for_as_in_vllm() -> None:
    assert not parse_settings(MODEL, {}).enforce_eager
    assert parse_settings([*MODEL, "--enforce-eager"], {}).enforce_eager
    assert parse_settings(MODEL, {"TOKENMILL_ENFORCE_EAGER": "true"}).enforce_eager
