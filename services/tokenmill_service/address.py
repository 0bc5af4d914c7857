"""Addresses to listen on: HOST:PORT or unix:PATH, and the lock that keeps a second process off a unix path.

Must not know: what is served there.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from tokenmill_service.flags import SettingsError
from tokenmill_service.lock_file import take_lock

_UNIX = "unix:"


def check_address(address: str, flag: str) -> str:
    """The address; raises SettingsError when it is none."""
    if address.startswith(_UNIX):
        if address == _UNIX:
            raise SettingsError(f"{flag} unix: needs a path behind it, such as unix:/run/tokenmill/service.sock")
    elif not (match := re.fullmatch(r".+:(\d{1,5})", address)) or int(match[1]) > 65535:
        raise SettingsError(f"{flag} {address} is neither HOST:PORT nor unix:PATH")
    return address


def check_metrics_address(address: str) -> str:
    """As `check_address`, for what only TCP serves; empty is none."""
    if address.startswith(_UNIX):
        raise SettingsError(f"--metrics-address {address} is no HOST:PORT: Prometheus asks over TCP")
    return address and check_address(address, "--metrics-address")


def lock_address(listen: str) -> int | None:
    """For a unix path, takes a lock file beside it until the process ends and returns its descriptor.

    A second bind on a unix path silently takes it from the first. Raises SettingsError if another process holds the lock.
    """
    if not listen.startswith(_UNIX):
        return None
    path = Path(listen.removeprefix(_UNIX) + ".lock")
    try:
        return take_lock(path)
    except BlockingIOError as error:
        raise SettingsError(f"another process listens on {listen}: stop it, or choose another --listen") from error
    except OSError as error:
        raise SettingsError(f"--listen {listen}: the lock file {path} cannot be made: {error.strerror}") from error


def bound_address(listen: str, port: int) -> str:
    """`listen` with the port that was really bound."""
    return listen if listen.startswith(_UNIX) else f"{listen.rpartition(':')[0]}:{port}"


def default_name(address: str) -> str:
    """Host name and port, or host name and path: unique as long as host names are."""
    tail = address.removeprefix(_UNIX) if address.startswith(_UNIX) else address.rpartition(":")[2]
    return f"{socket.gethostname()}:{tail}"


def is_open(listen: str) -> bool:
    """Whether other machines can reach it, so that what passes there is to be protected."""
    host = listen.rpartition(":")[0].strip("[]")
    if listen.startswith(_UNIX) or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def write_port_file(path: Path, address: str) -> None:
    """All at once, so that a reader never sees half of it. Raises SettingsError when it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(address)
        part.replace(path)
    except OSError as error:
        raise SettingsError(f"--port-file {path} cannot be written: {error.strerror}") from error
