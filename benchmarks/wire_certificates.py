"""Certificates for trials, made by the `openssl` command."""

import subprocess
from pathlib import Path
from typing import Final, final

from paceline.transport.tls import TlsSettings

_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def settings_in(folder: Path, name: str, authority: str = "authority") -> TlsSettings:
    """Return the files of a certificate that was issued before."""
    return TlsSettings(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{authority}.pem")


@final
class Authority:
    """Signs certificates; its own, all others and their keys are files in one folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._openssl(
            "req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"
        )

    def issue(self, name: str, num_days: int = 1) -> TlsSettings:
        """Sign a certificate that holds for some days; for a negative number, it has expired."""
        self._openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-days", str(num_days), "-out", f"{name}.pem")
        return settings_in(self._folder, name, self._name)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=self._folder, capture_output=True, timeout=60)
