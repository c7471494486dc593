"""Authorities and certificates for tests, made by the command that docs/security.md shows: openssl."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system import missing

CLIENT_AND_SERVER = "extendedKeyUsage=clientAuth,serverAuth"


def openssl(*words: str, cwd: Path) -> str:
    """Run one openssl command. Without it the test that asks is skipped, and says so."""
    if why := missing("openssl"):
        pytest.skip(why)
    ended = subprocess.run(["openssl", *words], cwd=cwd, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, (words, ended.stderr)
    return ended.stdout


@dataclass(frozen=True, slots=True)
class Files:
    """What one node is configured with."""

    cert: Path
    key: Path
    ca: Path

    def options(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key), "tls_ca": str(self.ca)}

    def take(self, other: Files) -> None:
        """Put another one's files in the place of these, one after the other, as an operator would."""
        for mine, its in ((self.key, other.key), (self.cert, other.cert), (self.ca, other.ca)):
            fresh = mine.with_suffix(".new")
            shutil.copy(its, fresh)
            fresh.replace(mine)


class Authority:
    """An authority with its key in ``directory``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.cert, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        self._new_key(self.key)
        words = ("req", "-x509", "-new", "-key", str(self.key), "-out", str(self.cert), "-days", "30")
        openssl(*words, "-subj", f"/CN={name}", cwd=directory)

    def issue(
        self, name: str, node_id: str = "", *, days: int = 2, subject: str = "", extensions: tuple[str, ...] = ()
    ) -> Files:
        """A certificate for a node, named by the URI if ``node_id`` is given; ``days`` below 0: it has expired."""
        key, request = self.directory / f"{name}.key", self.directory / f"{name}.csr"
        cert, own = self.directory / f"{name}.pem", self.directory / f"{name}.ext"
        lines = [CLIENT_AND_SERVER, *((f"subjectAltName=URI:kvxfer://node/{node_id}",) if node_id else ())]
        own.write_text("\n".join(extensions or lines) + "\n")
        self._new_key(key)
        openssl(
            "req", "-new", "-key", str(key), "-out", str(request), "-subj", subject or f"/CN={name}", cwd=own.parent
        )
        signed = ("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self.key))
        more = ("-CAcreateserial", "-out", str(cert), "-days", str(days), "-extfile", str(own))
        openssl(*signed, *more, cwd=own.parent)
        return Files(cert, key, self.cert)

    def _new_key(self, path: Path) -> None:
        path.touch(mode=0o600)
        openssl(
            "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(path), cwd=path.parent
        )
        os.chmod(path, 0o600)
