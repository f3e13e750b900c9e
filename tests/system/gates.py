"""TCP relays that fail as networks do: cut on both sides, on one side only, or closed for a while."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class Gate:
    """A port in front of a broker. Every connection through it may be cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._open = True
        self._relays = 0
        self.port = 0

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def end(self) -> None:
        self._server.close()
        await self.cut(0.0)
        while self._relays:
            await asyncio.sleep(0.01)

    async def cut(self, broker_hears_after_s: float) -> None:
        """Resets the clients' side of every connection now, and the broker's side later."""
        cut, self._connections = self._connections, []
        for client, broker in cut:
            client.transport.abort()
            asyncio.get_running_loop().call_later(broker_hears_after_s, broker.transport.abort)

    def close(self, closed: bool) -> None:
        """Whether new connections are turned away."""
        self._open = not closed

    async def _relay(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self._relays += 1
        try:
            await self._carry(reader, client)
        finally:
            self._relays -= 1

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            answers, broker = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            client.transport.abort()
            return
        if not self._open:
            client.transport.abort()
            broker.transport.abort()
            return
        pair = (client, broker)
        self._connections.append(pair)
        from_broker = asyncio.ensure_future(_pump(answers, client))
        await _pump(reader, broker)
        if pair in self._connections:  # else it was cut, and `cut` decides when the broker hears of it
            self._connections.remove(pair)
            broker.transport.abort()
        await from_broker
        client.transport.abort()
        if pair in self._connections:
            self._connections.remove(pair)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


class Gates:
    """Gates, served by a thread of their own."""

    def __init__(self) -> None:
        self._gates: list[Gate] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gates", daemon=True)
        self._thread.start()

    def gate(self, target_port: int) -> Gate:
        made = Gate(target_port)
        self._gates.append(made)
        self._run(made.serve()).result(10.0)
        return made

    def cut(self, gate: Gate, *, broker_hears_after_s: float = 0.0) -> None:
        """See Gate.cut; returns when the client's side is gone."""
        self._run(gate.cut(broker_hears_after_s)).result(10.0)

    def stop(self) -> None:
        for gate in self._gates:
            gate.close(True)
            self._run(gate.end()).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
