"""`paceline relay`: hands versions on to many readers. Light until it runs, as `run` is."""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.serve.access import ServeUrl
    from paceline.transport.base import Secret

DEFAULT_ADDRESS: Final = "127.0.0.1:7710"


def relay(
    address: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    listen: str = DEFAULT_ADDRESS,
    name: Annotated[tuple[str, ...], Parameter(negative="")] = ("policy",),
    keep: int = 2,
    leased: int = 4,
    compress: Annotated[bool, Parameter(negative="")] = False,
    token: Path | None = None,
    keys: Path | None = None,
) -> int:
    """Serve published versions of a job to many readers, which cost the job as much as one, until Ctrl-C or SIGTERM.

    Readers subscribe with paceline.subscribe("paceline://HOST:PORT"); a relay may read from another relay.

    Parameters
    ----------
    address
        Where versions are published: the folder of a job, paceline://HOST:PORT/NAME, or another relay; of several, the
        next one is read where one is lost.
    listen
        HOST:PORT at which readers connect; port 0 is any that is free.
    name
        A name under which versions are published; may be given several times.
    keep
        How many of the newest versions of each name stay in memory.
    leased
        How many versions of each name readers may keep by leases.
    compress
        Compress what changes between versions on its way to this relay, for slow lines.
    token
        File of the token that readers show, and that lets the relay in at an address. For a relay of a folder it is
        made where it is missing; by default readers show the token that the folder has now.
    keys
        Folder with a certificate for relay-0 and a token, as `paceline keys issue` writes it. A relay that other
        machines reach needs it.
    """
    from paceline.job.credentials.holders import REVOKED_NAME
    from paceline.job.credentials.revocation import watching_revoked
    from paceline.job.machines import format_host_port, look_up, parse_host_port
    from paceline.launch.signals import at_first_signal
    from paceline.serve.access import ClientCredentials, ServeUrl, relay_access
    from paceline.versions.places import find_places, is_address
    from paceline.versions.relay import RelaySettings, VersionRelay
    from paceline.wire.versions import MAX_KEPT, MAX_LEASED, check_published_name

    addresses = [each for each in address if is_address(each)]
    namespaces = {ServeUrl.parse(each).namespace for each in addresses}
    if len(namespaces) > 1:
        raise UsageError(f"the addresses name several jobs, {', '.join(sorted(namespaces))}: start a relay for each")
    for option, number, most in (("--keep", keep, MAX_KEPT), ("--leased", leased, MAX_LEASED)):
        if not 1 <= number <= most:
            raise UsageError(f"{option} is {number}, expected 1 to {most} versions")
    host, port = parse_host_port(listen)
    shown = ClientCredentials(None if keys is not None or not addresses else token, keys if addresses else None)
    places = find_places(address, shown, "relay", compress=compress)
    folders = [each for each in address if not is_address(each)]
    access = relay_access(host, lambda: _secret(token, folders, ServeUrl(host, port)), keys)
    listener = access.transport().listen(format_host_port(look_up(host)[0], port))
    settings = RelaySettings(
        tuple(dict.fromkeys(map(check_published_name, name))), keep, leased, next(iter(namespaces), "default")
    )
    serving = VersionRelay(listener, places, settings)
    where = f"paceline://{listener.address.removeprefix('tcp://')}/{settings.namespace}"
    with at_first_signal(lambda _: serving.stop()):
        sys.stdout.write(f"paceline: relaying {', '.join(settings.names)} of {places.name} at {where}\n")
        sys.stdout.flush()
        with watching_revoked(None if keys is None else keys / REVOKED_NAME, serving.expel):
            serving.run()
    return 0


def _secret(token: Path | None, folders: list[str], own: "ServeUrl") -> "Secret":
    """Return the secret that readers on this machine know."""
    from paceline.job.spec import TOKEN_BYTES, read_token, write_private
    from paceline.serve.access import JOB, ClientCredentials
    from paceline.transport.base import Credentials

    if token is None and folders:
        return Credentials(read_token(Path(folders[0])), JOB)  # the job removes the file when it ends
    if token is not None and folders and not token.exists():
        write_private(token, secrets.token_bytes(TOKEN_BYTES))
    return ClientCredentials(token).secret(own)
