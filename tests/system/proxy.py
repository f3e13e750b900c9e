"""A network between two processes that can be cut: TCP connections through a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Proxy:
    """Forwards connections to `port`; a context that ends with all of them closed.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{port}", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10.0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Ends all connections and accepts none, as a broker does that is gone."""
        self._open = False
        self._loop.call_soon_threadsafe(self._abort)

    def stall(self) -> None:
        """Lets nothing pass, and tells neither side, as a pulled cable does."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def mend(self) -> None:
        """Lets everything pass again; connections that were stalled are dead by then, as after a change of address."""
        self._open = True
        self._loop.call_soon_threadsafe(self._flow_again)

    def close(self) -> None:
        """Ends it."""

        async def end() -> None:
            self._server.close()
            self._abort()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _flow_again(self) -> None:
        if not self._flowing.is_set():
            self._abort()
            self._flowing.set()

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            if not self._open:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass  # the broker is away: the caller sees its connection closed
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
