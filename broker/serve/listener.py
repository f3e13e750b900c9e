"""Checks the address and port where a broker is to listen, before it is started there."""

from __future__ import annotations

import errno
import socket

from broker.contract import errors


def reserve(host: str, port: int) -> int:
    """Returns the port that a broker can listen on: `port`, or any free one for 0.

    Asked for here because the brokers' own messages differ and none says what to do.

    Raises:
        ConfigError: The port is taken, or the address is not this machine's.
    """
    where = f"{host}:{port}"
    if not 0 <= port < 65536:  # the resolver takes it modulo 65536
        raise errors.ConfigError(f"{port} is not a port", where=where, todo="use 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise errors.ConfigError(
                f"port {port} is in use, perhaps by another broker",
                where=where,
                todo="join that broker; or take another port (--port 0 finds a free one); or stop it "
                "(Debian starts one when mosquitto is installed: sudo systemctl disable --now mosquitto)",
            ) from None
        raise errors.ConfigError(
            f"a broker cannot listen there: {error}", where=where, todo="give --bind one of this machine's addresses"
        ) from None
