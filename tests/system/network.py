"""A network between two processes that fails as networks do: cut on both sides or one, blocked for a while, stalled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any


class Network:
    """Relays, served by a thread of their own; a context that ends with all of their connections closed."""

    def __init__(self) -> None:
        self._relays: list[Relay] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def relay(self, target_port: int) -> Relay:
        """A port of this machine in front of `target_port`."""
        made = Relay(target_port, self._run)
        self._relays.append(made)
        return made

    def close(self) -> None:
        """Ends all relays."""
        for relay in self._relays:
            relay.end()
        self._run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)


async def _end_tasks() -> None:
    """Ends what still runs for connections that are closed: a loop that stops before them complains."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Relay:
    """One port, and the connections through it. To be used from threads other than the network's.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        passed_bytes: What the target has sent through it.
        blocked: Set once `block_after` has cut.
    """

    def __init__(self, target_port: int, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._target_port = target_port
        self._run = run
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._open = True
        self.passed_bytes = 0
        self._block_at: int | None = None
        self.blocked = threading.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server = run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self, *, far_side_after_s: float = 0.0) -> None:
        """Resets the near side of every connection now, and the far side later; new ones are let through."""
        self._run(self._cut(far_side_after_s))

    def block(self, *, far_side_after_s: float = 0.0) -> None:
        """Cuts every connection, and turns new ones away until `mend`."""
        self._open = False
        self.cut(far_side_after_s=far_side_after_s)

    def block_after(self, more_bytes: int) -> None:
        """Cuts as `block` does, once the target has sent so many more bytes; the rest of them is lost on its way."""
        self._block_at = self.passed_bytes + more_bytes

    def stall(self) -> None:
        """Lets nothing pass, and tells neither side, as a pulled cable does."""
        self._run(self._stall())

    def mend(self) -> None:
        """Lets everything pass again; connections that were stalled are dead by then, as after a change of address."""
        self._open = True
        self._run(self._flow())

    def end(self) -> None:
        """Closes the port and every connection."""
        self._run(self._end())

    async def _cut(self, far_side_after_s: float) -> None:
        pairs, self._pairs = self._pairs, []
        for near, far in pairs:
            near.transport.abort()
            asyncio.get_running_loop().call_later(far_side_after_s, far.transport.abort)

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _flow(self) -> None:
        if not self._flowing.is_set():
            await self._cut(0.0)
            self._flowing.set()

    async def _end(self) -> None:
        self._open = False
        self._server.close()
        await self._cut(0.0)
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            await self._flowing.wait()
            answers, far = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:  # the broker is away: the caller sees its connection closed
            near.transport.abort()
            return
        pair = (near, far)
        if self._open:
            self._pairs.append(pair)
            back = asyncio.ensure_future(self._pump(answers, near, self._count))
            await self._pump(reader, far)
            if pair not in self._pairs:  # it was cut, and `cut` decides when the far side hears of it
                await back
                return
            far.transport.abort()
            await back
            self._pairs.remove(pair)
        near.transport.abort()
        far.transport.abort()

    async def _count(self, size: int) -> None:
        self.passed_bytes += size
        if self._block_at is not None and self.passed_bytes > self._block_at:
            self._block_at, self._open = None, False
            await self._cut(0.0)
            self.blocked.set()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                if count is not None:
                    await count(len(data))
                writer.write(data)
                await writer.drain()
