"""`paceline keys`: certificates and a token for jobs over several machines."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="keys", help="Make, hand on, rotate and revoke the keys of jobs over several machines.")


@app.command
def make(folder: Path, /, *, days: int = 30) -> int:
    """Make a folder of keys: an authority, a token, and a certificate for any process.

    Parameters
    ----------
    folder
        A new folder; only you can enter it. What is there is never overwritten.
    days
        Days for which the certificates are valid.
    """
    from paceline.job.credentials.key_store import certificates, make_keys

    make_keys(folder, days=days)
    until = certificates(folder)[0].until
    print(
        f"{folder} holds keys until {until:%Y-%m-%d %H:%M} UTC. authority.key stays here; what another machine needs, "
        f"`paceline keys issue {folder} worker-0 --out NEW_FOLDER` writes."
    )
    return 0


@app.command
def issue(folder: Path, holder: str, /, *, out: Path) -> int:
    """Make a certificate for one process, and a folder to carry to its machine.

    Parameters
    ----------
    folder
        The folder of keys, with the key of the authority.
    holder
        The holder of the certificate: worker-3, server-0, reader-0, relay-0 or any.
    out
        The folder to carry: certificate, key, token and the authority's certificate, never its key.
    """
    from paceline.job.credentials.holders import Holder
    from paceline.job.credentials.key_store import issue_keys

    issue_keys(folder, Holder.parse(holder), out)
    print(f"{out} holds a certificate for {holder}: transfer it by a channel that no one else can read")
    return 0


@app.command
def rotate(folder: Path, /, *, finish: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Make a new token; the previous one stays valid until --finish.

    Parameters
    ----------
    folder
        The folder of keys, or of a running job.
    finish
        End the validity of the previous token.
    """
    from paceline.job.credentials.key_store import expire_previous_token, rotate_token

    if finish:
        expire_previous_token(folder)
        print(f"{folder}: the previous token holds no longer")
    else:
        rotate_token(folder)
        print(f"{folder} has a new token; once every process has it, run `paceline keys rotate {folder} --finish`")
    return 0


@app.command
def revoke(folder: Path, subject: str, /) -> int:
    """Turn a holder, or one certificate, away from now on.

    Parameters
    ----------
    folder
        The folder of keys, or the folder `keys` of a running job: where its servers look.
    subject
        worker-3 for all certificates of that name, or a serial number as `paceline keys show` tells them.
    """
    from paceline.job.credentials.key_store import revoke as revoke_in

    num_known = revoke_in(folder, subject)
    print(
        f"{subject} is revoked for servers whose keys are in {folder}: they end its connections within a second. "
        f"Certificates known here that this ends: {num_known}"
    )
    return 0


@app.command
def show(folder: Path, /) -> int:
    """List the certificates of a folder, and what is wrong with them.

    Parameters
    ----------
    folder
        The folder of keys, one that was carried elsewhere, or the folder `keys` of a running job.
    """
    from paceline.job.credentials.key_store import certificates

    now = datetime.now(UTC)
    for found in certificates(folder):
        trouble = found.trouble(now)
        remark = f"  {trouble}" if trouble else ""
        print(f"{found.holder:<12} until {found.until:%Y-%m-%d %H:%M} UTC  {found.serial}{remark}")
    return 0
