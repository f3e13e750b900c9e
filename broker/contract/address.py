"""The address of a broker: `host`, `host:port` or `[v6]:port`, and whether TLS is spoken there.

TLS everywhere but on this machine: `desk.local` means TLS, `127.0.0.1` does not, `mqtts://127.0.0.1` does. There is no
way to write a plain connection over a network, because the broker's passwords and all observations would cross it in
the clear.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from broker.contract import errors

PLAIN_PORT = 1883
TLS_PORT = 8883


@dataclass(frozen=True, slots=True)
class Address:
    """The host and port of a broker."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses `host`, `host:port` or `[v6]:port`, with `mqtts://` before it for TLS on this machine too.

        Raises:
            ConfigError: It is none of these.
        """
        scheme, _, rest = text.rpartition("://")
        host, colon, port = rest, "", ""
        if rest.startswith("["):
            host, _, after = rest[1:].partition("]")
            colon, port = after[:1], after[1:]
        elif rest.count(":") == 1:
            host, colon, port = rest.partition(":")
        elif ":" in rest and not _is_v6(rest):
            host = ""
        local = is_loopback(host)
        tls = scheme == "mqtts" or not local
        port = port if colon else str(TLS_PORT if tls else PLAIN_PORT)
        if scheme == "mqtt" and not local:
            raise errors.ConfigError(
                f"{text!r} asks for a connection without TLS over a network",
                todo=f"write {host}: that means TLS; or bring the broker to this machine (ssh -L) and name 127.0.0.1",
            )
        if (
            scheme not in ("", "mqtt", "mqtts")
            or colon not in ("", ":")
            or not host
            or not port.isdigit()
            or not 0 < int(port) < 65536
        ):
            raise errors.ConfigError(f"{text!r} is not a broker address", todo="write host or host:port")
        return cls(host, int(port), tls)

    def __str__(self) -> str:
        """Returns the address, as short as `parse` understands it."""
        scheme = "mqtts://" if self.tls and is_loopback(self.host) else ""
        return f"{scheme}[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Returns true if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_v6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
