"""docker-compose.yml and the Dockerfile name what there is: flags, variables, commands, files, stages and ports."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tokenmill_cli.main import cli
from tokenmill_executor import settings as executor_settings
from tokenmill_scheduler import settings as scheduler_settings
from tokenmill_service.flags import FlagParser

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
SETTINGS = {"executor": executor_settings, "scheduler": scheduler_settings}
# Of services of ours, those that run one of the two programs.
PROGRAMS = ["executor", "scheduler"]


def services(*files: str) -> dict[str, Any]:
    """Of the files laid over each other, with variables at their defaults."""
    merged: dict[str, Any] = {}
    for file in files:
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / file).read_text())
        for name, service in yaml.safe_load(text)["services"].items():
            merged[name] = {**merged.get(name, {}), **service}
    return merged


PLAIN = services("docker-compose.yml")
WITH_CUDA = services("docker-compose.yml", "docker-compose.cuda.yml")


def parse(name: str, service: dict[str, Any], cache: Path) -> Any:
    """The settings that its process has, with a model that is there."""
    (cache / "models" / "smollm2-135m-instruct").mkdir(parents=True, exist_ok=True)
    environ = {**service.get("environment", {}), "TOKENMILL_CACHE": str(cache)}
    return SETTINGS[name].parse_settings(service["command"], environ)


def stage(target: str) -> str:
    """What the Dockerfile says of one."""
    match = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert match is not None, target
    return match[1]


@pytest.mark.parametrize("files", [PLAIN, WITH_CUDA], ids=["plain", "cuda"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_take_their_flags(name: str, files: dict[str, Any], tmp_path: Path) -> None:
    parse(name, files[name], tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_know_their_variables(name: str) -> None:
    """One that is unknown is not heeded, and not refused either."""
    parser: FlagParser = SETTINGS[name].parser()
    known = {f"TOKENMILL_{action.dest.upper()}" for action in parser._actions}
    assert known >= set(PLAIN[name].get("environment", {}))


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_image_runs_its_program_and_says_its_ports(name: str, tmp_path: Path) -> None:
    assert PLAIN[name]["build"]["target"] == name
    assert f'ENTRYPOINT ["python", "-m", "tokenmill_{name}"]' in stage(name)
    settings = parse(name, PLAIN[name], tmp_path)
    ports = {address.rpartition(":")[2] for address in (settings.listen, settings.metrics_address)}
    exposed = re.search(r"^EXPOSE (.*)$", stage(name), re.MULTILINE)
    assert exposed is not None
    assert set(exposed[1].split()) == ports
    published = {port.split(":")[1] for port in PLAIN[name].get("ports", ())}
    assert published <= ports


def test_who_is_called_listens(tmp_path: Path) -> None:
    """The scheduler calls the executor, health checks their own process, and Prometheus both."""
    settings = {name: parse(name, PLAIN[name], tmp_path) for name in PROGRAMS}
    ports = {name: one.listen.rpartition(":")[2] for name, one in settings.items()}
    assert settings["scheduler"].executors == (f"executor:{ports['executor']}",)
    for name, port in ports.items():
        assert PLAIN[name]["healthcheck"]["test"] == ["CMD", "tokenmill", "health", f"127.0.0.1:{port}"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job["static_configs"] for target in static["targets"]}
    assert targets == {f"{name}:{one.metrics_address.rpartition(':')[2]}" for name, one in settings.items()}


@pytest.mark.parametrize("words", [["health", "127.0.0.1:7600"], [*PLAIN["model"]["command"]]])
def test_commands_of_the_command_line_are_there(words: list[str]) -> None:
    """Parsed, and not carried out."""
    assert PLAIN["model"]["entrypoint"] == ["tokenmill"]
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, words
        command, words = found, words[1:]
    command.make_context(command.name, words)


def test_what_the_images_copy_and_containers_mount_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    assert len(copied) > 5
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch(source, pattern) for pattern in ignored), source
    for name, service in WITH_CUDA.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).is_dir(), f"{name}: {volume}"
        assert set(service.get("depends_on", ())) <= set(WITH_CUDA), name
