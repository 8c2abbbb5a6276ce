"""Certificates of every kind that an attacker might show, beside those that the processes of a job have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from tests.transport.carriers import CREDENTIALS

from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.certificates import request as key_request
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport import TlsSettings


class Certificates:
    """The authority of one job, and a folder for each holder of a certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority.make(CREDENTIALS.job)

    def of(self, holder: Holder) -> TlsSettings:
        """Return what the launcher gives to a process of the job."""
        folder = self._fresh(str(holder))
        self._authority.issue(folder, holder)
        return tls_settings(folder, holder)

    def of_another_job(self) -> TlsSettings:
        """Return a certificate that our authority has signed for another job, as that of a team would."""
        return self._signed("other-job", replace(self._authority, job="another job"))

    def of_a_stranger(self) -> TlsSettings:
        """Return a certificate of another authority, shown by a peer that trusts ours."""
        return self._signed("stranger", Authority.make(CREDENTIALS.job))

    def of_time(self, name: str, begins: timedelta, ends: timedelta) -> TlsSettings:
        """Return a certificate of our authority that holds between two times, counted from now."""
        holder, folder = Holder("worker", 1), self._fresh(name)
        self._authority.issue(folder, holder)
        settings = tls_settings(folder, holder)
        now, key = datetime.now(UTC), self._authority.key
        signed = x509.load_pem_x509_certificate(settings.certificate.read_bytes())
        builder = (
            x509.CertificateBuilder()
            .subject_name(signed.subject)
            .issuer_name(signed.issuer)
            .public_key(signed.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
        )
        for extension in signed.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        settings.certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return settings

    def _signed(self, name: str, signer: Authority) -> TlsSettings:
        holder, folder = Holder("worker", 1), self._fresh(name)
        (folder / f"{holder}.pem").write_bytes(signer.sign(key_request(folder, holder), holder))
        (folder / "authority.pem").write_bytes(self._authority.pem)
        return tls_settings(folder, holder)

    def _fresh(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder
