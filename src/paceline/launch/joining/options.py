"""Options of `paceline run` about workers of other machines. Light, as the command line imports it."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from paceline.errors import UsageError
from paceline.job.choices import TransportName


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a run lets workers of other machines join.

    Parameters
    ----------
    listen
        HOST:PORT at which workers of other machines join (paceline join), an address of this machine; port 0 takes a
        free one. It needs --keys, and workers and servers then talk by encrypted TCP.
    keys
        Folder with certificates and a token, as paceline keys make writes it, for --listen.
    """

    listen: str | None = None
    keys: Path | None = None

    def validate(self, transport: TransportName, *, is_elastic: bool) -> None:
        """Raise UsageError for options that do not go together."""
        if self.listen is None:
            if self.keys is not None:
                raise UsageError(
                    "--keys is for --listen: leave it out, as a run that other machines do not join makes its own token"
                )
            return
        if self.keys is None:
            raise UsageError(
                f"--listen is {self.listen}, where other machines may join, which needs certificates: make them with "
                "`paceline keys make KEYS`, and give --keys KEYS"
            )
        if not is_elastic:
            raise UsageError(
                f"--listen is {self.listen}, and the number of workers is fixed: give a range, as --workers 2:8"
            )
        if transport == "memory":
            raise UsageError(
                f"--listen is {self.listen}, and with --transport memory the job is one process; choose shm or tcp"
            )
        self.address()

    def address(self) -> tuple[str, int]:
        """Return the address and port; raises UsageError where other machines could not tell which machine it is."""
        from paceline.job.machines import look_up, parse_host_port

        host, port = parse_host_port(self.listen or "")
        address = look_up(host)[0]
        if ip_address(address).is_unspecified:
            raise UsageError(
                f"--listen is {self.listen}, which is no address to connect to: name the one at which other machines "
                "reach this one"
            )
        return address, port
