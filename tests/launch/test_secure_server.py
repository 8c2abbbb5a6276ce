"""A server process with certificates: what it tells, what it never tells, and what changes while it runs."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.core.messages import Sender
from paceline.core.settings import WorkerSettings
from paceline.errors import AuthenticationFailed, PeerError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME
from paceline.job.carriers import make_transport
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import KEYS_NAME, Holder, tls_settings
from paceline.job.credentials.key_store import expire_previous_token, revoke, rotate_token
from paceline.job.spec import ClusterSpec, write_token
from paceline.transport import Credentials, TcpTransport
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions

DEADLINE_S = 200.0


def prepared(run_dir: Path) -> ClusterSpec:
    spec = ClusterSpec(
        job="secure", num_workers=2, num_servers=1, transport="tcp", run_dir=str(run_dir), encrypted=True, trace="full"
    )
    (run_dir / KEYS_NAME).mkdir(mode=0o700)
    (run_dir / "trace").mkdir()
    write_token(run_dir)
    authority = Authority.make(spec.job)
    for holder in (Holder("server", 0), Holder("worker", 0), Holder("worker", 1)):
        authority.issue(run_dir / KEYS_NAME, holder)
    spec.write(run_dir / SPEC_NAME)
    return spec


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@contextmanager
def server_process(spec: ClusterSpec) -> Iterator[tuple[subprocess.Popen[bytes], ClusterSpec]]:
    """The process, and the spec with its address; killed if the test does not stop it."""
    run_dir = Path(spec.run_dir)
    command = [sys.executable, "-m", "paceline.launch.server", str(run_dir / SPEC_NAME), "0"]
    with (run_dir.parent / "said").open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT)
    with process:
        try:
            address = run_dir / "server-0.address"
            until(lambda: address.exists() or process.poll() is not None)
            spec = replace(spec, addresses=(address.read_text(),))
            spec.write(run_dir / CLUSTER_NAME)
            yield process, spec
        finally:
            process.kill()


def joined(spec: ClusterSpec, rank: int) -> WorkerNode:
    transport = make_transport(spec, Holder("worker", rank), lambda _: None)
    node = WorkerNode(WorkerSettings(Sender(1, rank, 0), 1), transport, spec.addresses, WorkerOptions(DEADLINE_S, 0.2))
    node.join()
    return node


def can_connect(spec: ClusterSpec, rank: int) -> bool:
    try:
        make_transport(spec, Holder("worker", rank), lambda _: None).connect(
            spec.addresses[0], b"", timeout_s=5
        ).close()
    except PeerError:
        return False
    return True


def spellings(run_dir: Path) -> list[bytes]:
    """All secrets of a job, in every form in which they might be written somewhere."""
    tokens = [path.read_bytes() for path in run_dir.glob("token*")]
    keys = [line for path in (run_dir / KEYS_NAME).glob("*.key") for line in path.read_bytes().splitlines()[1:-1]]
    written = [form for token in tokens for form in (token, token.hex().encode(), base64.b64encode(token)[:40])]
    return [*written, *keys, *(repr(token)[2:-1].encode() for token in tokens)]


def test_a_server_process_from_its_start_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    secrets: list[bytes] = []
    with server_process(prepared(run_dir)) as (process, spec):
        first, second = joined(spec, 0), joined(spec, 1)
        tls = tls_settings(run_dir / KEYS_NAME, Holder("worker", 0))
        stranger = TcpTransport(Credentials(bytes(32), spec.job), tls=tls)
        with pytest.raises(AuthenticationFailed):
            stranger.connect(spec.addresses[0], b"", timeout_s=30)
        secrets += spellings(run_dir)

        rotate_token(run_dir)
        assert can_connect(spec, 0)
        expire_previous_token(run_dir)
        assert can_connect(spec, 0)
        secrets += spellings(run_dir)

        revoke(run_dir / KEYS_NAME, "worker-1")
        until(lambda: bool(second._lock.failure))
        assert not can_connect(spec, 1)
        assert "or the certificate was revoked" in second._lock.failure
        second.close()

        with closing(first):
            first.leave()
        seen = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        process.communicate(b"stop\n", timeout=DEADLINE_S)
        assert process.returncode == 0
    said = (tmp_path / "said").read_text()
    assert "was turned away: the client did not prove that it belongs to this job" in said
    assert "was turned away: the certificate of the client (worker-1, " in said
    assert all(line.startswith("paceline: ") for line in said.splitlines())
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    public = [path for path in files if path.suffix != ".key" and not path.name.startswith("token")]
    written = [said.encode(), repr(first).encode(), repr(spec).encode(), *seen, *(path.read_bytes() for path in public)]
    assert len(secrets) > 10
    assert not [secret for secret in secrets if any(secret in content for content in written)]
