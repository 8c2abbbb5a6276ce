"""Certificates for trials, made by the library trustme."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import final

from paceline.transport.tls import TlsSettings


def settings_in(folder: Path, name: str, authority: str = "authority") -> TlsSettings:
    """Return the files of a certificate that was issued before."""
    return TlsSettings(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{authority}.pem")


@final
class Authority:
    """Signs certificates; its own, all others and their keys are files in one folder.

    Raises ModuleNotFoundError where trustme is not installed.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        import trustme

        self._folder = folder
        self._name = name
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / f"{name}.pem")

    def issue(self, name: str, num_days: int = 1) -> TlsSettings:
        """Sign a certificate that holds for some days; for a negative number, it has expired."""
        now = datetime.now(UTC)
        issued = self._authority.issue_cert(
            "member.example",
            common_name=name,
            not_before=now - timedelta(days=100),
            not_after=now + timedelta(days=num_days),
        )
        issued.private_key_pem.write_to_path(self._folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(self._folder / f"{name}.pem")
        return settings_in(self._folder, name, self._name)
