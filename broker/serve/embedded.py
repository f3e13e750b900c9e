"""The pure-Python broker (amqtt) in the current process: one machine, loopback only, everything in memory.

amqtt's manners that this file changes, and those that it leaves, are listed with figures in docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from broker.contract import address, errors
from broker.serve import listener

try:
    import amqtt.broker
except ImportError as _error:
    raise errors.RuntimeMissing(
        "the embedded broker is not installed", todo="pip install 'actorq-fleet[local]', or install mosquitto"
    ) from _error

_STOP_TIMEOUT_S = 1.5
"""amqtt drains every client's socket before it closes it, and one that does not read would hold the exit for ever."""


class _Payload(bytes):
    """amqtt formats each payload into a debug line that nobody sees: 0.4 s for 40 MB. This one formats at once."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


class _Inbox(asyncio.Queue[Any]):
    """Hands on at once what amqtt would queue, acknowledge, and forget if its sender disconnects before its turn.

    A sender that waits for all acknowledgements before it leaves lost 173 to 2600 of 3000 messages (Python 3.13).
    """

    def __init__(self, deliver: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__()
        self._deliver = deliver

    async def put(self, item: Any) -> None:
        await self._deliver(item)


class _Broker(amqtt.broker.Broker):  # type: ignore[misc]  # amqtt has no types
    async def _initialize_client_session(self, *args: Any) -> tuple[Any, Any]:
        handler, session = await super()._initialize_client_session(*args)

        async def deliver(message: Any) -> None:
            arrived = asyncio.get_running_loop().create_future()
            arrived.set_result(message)
            await self._handle_message_delivery(session, handler, arrived)

        session.delivered_message_queue = _Inbox(deliver)
        return handler, session

    async def _broadcast_message(self, session: Any, topic: Any, data: Any, force_qos: int | None = None) -> None:
        await super()._broadcast_message(session, topic, _Payload(data or b""), force_qos)

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        # amqtt calls this for a client that has just connected, with the filters of *all* clients: every actor would
        # be sent every retained message that anyone had subscribed to.
        subscribers = self.subscriptions.get(subscription[0], [])
        if any(subscriber is session for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)


def run(bind: str, port: int, on_ready: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then stops within two seconds.

    Args:
        bind: A loopback address.
        port: 0 takes any free port.
        on_ready: Called with the real port once clients can connect.

    Raises:
        ConfigError: The address is not of this machine alone, or the port is taken.
    """
    if not address.is_loopback(bind):
        raise errors.ConfigError(
            "the embedded broker serves one machine: it has no passwords and no TLS",
            where=f"--bind {bind}",
            todo="install mosquitto (sudo apt install mosquitto), or bind 127.0.0.1",
        )
    for noisy in ("amqtt", "transitions", "asyncio"):  # a line per packet, and tracebacks for clients that vanish
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)
    asyncio.run(_serve(bind, port, on_ready))


async def _serve(bind: str, port: int, on_ready: Callable[[int], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    port = listener.reserve(bind, port)
    broker = _Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"}},
            # Named in full because the default set also publishes $SYS and logs each packet.
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    await broker.start()
    on_ready(port)
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(broker.shutdown(), _STOP_TIMEOUT_S)
