"""Certificates of one authority open the doors of its job, wherever the keys were made."""

from __future__ import annotations

import stat
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509

from paceline.errors import UsageError
from paceline.job.carriers import listen_address, make_transport
from paceline.job.credentials.certificates import Authority, request
from paceline.job.credentials.holders import KEYS_NAME, Holder, tls_settings
from paceline.job.spec import ClusterSpec, write_private, write_token

SERVER, WORKER = Holder("server", 0), Holder("worker", 3)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("job 7/a")


def names_in(certificate: bytes) -> list[str]:
    found = x509.load_pem_x509_certificate(certificate).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def test_a_certificate_names_its_holder(authority: Authority, tmp_path: Path) -> None:
    for holder in (SERVER, WORKER, Holder("any")):
        authority.issue(tmp_path, holder)
    said = [names_in((tmp_path / f"{name}.pem").read_bytes()) for name in ("server-0", "worker-3", "any")]
    assert said == [[f"paceline://job%207%2Fa/{holder}"] for holder in ("server/0", "worker/3", "any")]


def test_what_is_secret_only_its_owner_can_read(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path, WORKER)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert "PRIVATE" not in repr(authority)


def test_a_process_without_a_certificate_takes_the_one_for_any(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path, SERVER)
    assert tls_settings(tmp_path, SERVER).key == tmp_path / "server-0.key"
    assert tls_settings(tmp_path, WORKER).certificate == tmp_path / "any.pem"


def test_processes_of_a_job_meet_over_any_address(authority: Authority, tmp_path: Path) -> None:
    """One has its key made for it, the other makes its own and has it signed."""
    spec = ClusterSpec(
        job="job 7/a", num_workers=4, num_servers=1, transport="tcp", run_dir=str(tmp_path), encrypted=True
    )
    keys = tmp_path / KEYS_NAME
    keys.mkdir()
    write_token(tmp_path)
    authority.issue(keys, SERVER)
    write_private(keys / "worker-3.pem", authority.sign(request(keys, WORKER), WORKER))
    with (
        closing(make_transport(spec, SERVER).listen(listen_address(spec, 0, "0.0.0.0"))) as listener,
        closing(make_transport(spec, WORKER).connect(listener.address, b"me", timeout_s=30)),
        closing(listener.accept(timeout_s=30)) as accepted,
    ):
        assert accepted.identity == b"me"


def test_only_a_request_is_signed(authority: Authority) -> None:
    with pytest.raises(UsageError, match="not a request for a certificate"):
        authority.sign(b"nonsense", WORKER)


def test_a_certificate_must_hold_for_a_while() -> None:
    with pytest.raises(UsageError, match="for 0 days"):
        Authority.make("job", days=0)
