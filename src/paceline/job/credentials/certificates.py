"""Certificates for the processes of one job, and the authority that signs them.

Keys are on the curve P-256. A certificate names its holder by the URI paceline://JOB/ROLE/RANK, or
paceline://JOB/any for any process of the job, and holds from an hour ago, because clocks of machines differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, final
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import UsageError
from paceline.job.credentials.holders import AUTHORITY_NAME, Holder
from paceline.job.spec import write_private
from paceline.transport.peer_identity import SCHEME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

DEFAULT_DAYS: Final = 30
AUTHORITY_KEY_NAME: Final = f"{AUTHORITY_NAME}.key"
_AUTHORITY: Final = "authority"  # its name in its own certificate
_MOST_DAYS: Final = 36_500
_CLOCKS_DIFFER: Final = timedelta(hours=1)


@final
@dataclass(frozen=True, slots=True)
class Authority:
    """Signs for the processes of one job: a holder of a certificate of this authority is one of them.

    Its key is in the memory of a launcher, or in a folder of keys that the user keeps.

    >>> import tempfile
    >>> authority = Authority.make("mnist-7")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     authority.issue(Path(folder), Holder("worker", 3))
    ...     print(*sorted(path.name for path in Path(folder).iterdir()))
    authority.pem worker-3.key worker-3.pem
    """

    job: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @staticmethod
    def make(job: str, *, days: int = DEFAULT_DAYS) -> Authority:
        """Make an authority that holds for some days; raises UsageError when there are none."""
        if not 1 <= days <= _MOST_DAYS:
            raise UsageError(f"certificates that hold for {days} days are of no use: expected 1 to {_MOST_DAYS} days")
        key, name, now = ec.generate_private_key(ec.SECP256R1()), _name(f"authority of {job}"), datetime.now(UTC)
        signer = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = (
            _builder(name, name, key.public_key(), now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(_says(job, _AUTHORITY), critical=False)
            .add_extension(signer, critical=False)
        )
        return Authority(job, builder.sign(key, hashes.SHA256()), key)

    @staticmethod
    def read(folder: Path) -> Authority:
        """Read the authority whose certificate and key are files in a folder.

        Raises UsageError when they are not there, or are not those of an authority.
        """
        try:
            certificate = x509.load_pem_x509_certificate((folder / f"{AUTHORITY_NAME}.pem").read_bytes())
            key = load_pem_private_key((folder / AUTHORITY_KEY_NAME).read_bytes(), password=None)
        except OSError as error:
            raise UsageError(
                f"cannot read the authority in {folder}: {error}. Certificates are issued where {AUTHORITY_KEY_NAME} "
                "is kept: where `paceline keys make` was run"
            ) from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"the authority in {folder} has a damaged file or a password: {error}") from error
        job, _, name = said_in(certificate).rpartition("/")
        if name != _AUTHORITY or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UsageError(f"{folder} does not hold an authority that `paceline keys make` has made")
        return Authority(unquote(job), certificate, key)

    @property
    def pem(self) -> bytes:
        """Its certificate, by which others are checked."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(self, folder: Path, holder: Holder) -> None:
        """Make a key for `holder` and sign for it: HOLDER.key (mode 0600), HOLDER.pem and authority.pem in `folder`."""
        certificate = self.sign(request(folder, holder), holder)
        write_private(folder / f"{AUTHORITY_NAME}.pem", self.pem)
        write_private(folder / f"{holder}.pem", certificate)

    def sign(self, request: bytes, holder: Holder) -> bytes:
        """Return a certificate for `holder`, in PEM format, of the key behind this request.

        Of the request nothing but the key is taken. Raises UsageError when it is none, or not signed by its key.
        """
        public = _key_of(request)
        mine = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(_name(str(holder)), self.certificate.subject, public, self.certificate.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(_says(self.job, str(holder).replace("-", "/")), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(mine),
                critical=False,
            )
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def request(folder: Path, holder: Holder) -> bytes:
    """Make a key for `holder` (HOLDER.key in `folder`, mode 0600), and return the request to sign for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / f"{holder}.key", private_pem(key))
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(str(holder)))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def said_in(certificate: x509.Certificate) -> str:
    """Return what a certificate says behind paceline://, or nothing."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    names = found.get_values_for_type(x509.UniformResourceIdentifier)
    return next((name.removeprefix(SCHEME) for name in names if name.startswith(SCHEME)), "")


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as the content of a file that must be kept secret."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _key_of(request: bytes) -> CertificatePublicKeyTypes:
    try:
        found = x509.load_pem_x509_csr(request)
        valid, public = found.is_signature_valid, found.public_key()
    except (ValueError, InvalidSignature) as error:
        raise UsageError(f"this is not a request for a certificate in PEM format: {error}") from error
    if not valid or not isinstance(public, ec.EllipticCurvePublicKey):
        raise UsageError("the request for a certificate is not signed by an elliptic curve key of its own")
    return public


def _builder(
    subject: x509.Name, issuer: x509.Name, key: CertificatePublicKeyTypes, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCKS_DIFFER)
        .not_valid_after(until)
    )


def _says(job: str, name: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{SCHEME}{quote(job, safe='')}/{name}")])


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
