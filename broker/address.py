"""Where a broker is: `host`, `host:port` or `[v6]:port`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from broker import errors

DEFAULT_PORT = 1883


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a broker."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `host`, `host:port` or `[v6]:port`.

        Raises:
            ConfigError: It is none of these.
        """
        host, port = text, str(DEFAULT_PORT)
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif text.count(":") == 1:
            host, port = text.split(":")
        elif ":" in text and not _is_v6(text):
            host = ""
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise errors.ConfigError(f"{text!r} is not a broker address", todo="write host or host:port")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_v6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
