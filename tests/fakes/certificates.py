"""Real certificates for tests, drawn when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate (PEM) and its private key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority of its own; `ca` is the path of its certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *identities: str) -> Pair:
        """For 127.0.0.1 unless it is to be for others. Of one name again: replaces the files, as a renewal does."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        issued = self._ca.issue_cert(*(identities or ("127.0.0.1",)), key_type=trustme.KeyType.ECDSA)
        issued.private_key_pem.write_to_path(pair.key)
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return pair
