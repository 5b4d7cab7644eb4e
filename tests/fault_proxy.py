"""A TCP proxy between an S3 client and its server, which spoils answers in the ways that networks and stores do."""

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> tuple[int, int]:
        """The first byte asked for, and the one after the last."""
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"]).groups()
        return int(first), int(last) + 1

    def is_read(self) -> bool:
        return self.method == "GET" and "range" in self.headers

    def is_write(self) -> bool:
        return self.method == "PUT"

    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path


@dataclass(frozen=True)
class Fault:
    """What becomes of one answer.

    Attributes:
        status, code: answer this error, and do not ask the server.
        after: send this many bytes of the body, or nothing at all if it is negative; then do what ``then`` says.
        then: "reset" or "close" the connection, "hang" until the client goes away, or "stall" for ``stall_seconds`` and
            then send the rest.
        cut: leave out this many last bytes of the body, with a Content-Length that says so.
        rate: send this many bytes a second.
        before: called before the server is asked.
        delay: seconds to wait before the server is asked, however many requests wait.
    """

    status: int = 0
    code: str = ""
    after: int | None = None
    then: str = "reset"
    stall_seconds: float = 5.0
    cut: int = 0
    rate: int = 0
    before: Callable[[], object] | None = None
    delay: float = 0

    def ends_before_the_answer(self) -> bool:
        return self.after is not None and self.after < 0 and self.then != "stall"


class Ended(Exception):
    """The connection to the client is over."""


@dataclass
class FaultProxy:
    """Serves on 127.0.0.1 in a thread of its own, for the time of a ``with`` block.

    Passes Host on as it came, so that signatures made for the proxy stay valid at the server. With ``tls``, a server's
    context, it ends TLS, too.
    """

    server: str
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def spoil(self, faults: Iterable[Fault | None], where: Callable[[Request], bool] = Request.is_read) -> None:
        """Spoils the answers to the next requests for which ``where`` holds; forgets the requests so far."""
        self.requests.clear()
        self._where, self._faults = where, iter(faults)

    @property
    def reads(self) -> list[Request]:
        return [request for request in self.requests if request.is_read()]

    def __enter__(self) -> "FaultProxy":
        self.spoil([])
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="fault-proxy", daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._stopped = asyncio.Event()
        listening = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self.tls)
        self.endpoint = f"{'https' if self.tls else 'http'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        await self._stopped.wait()
        listening.close()
        await asyncio.sleep(0)  # so that connections which were just accepted are known
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError, Ended):
                while True:
                    await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        finally:
            self.connections -= 1
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        request = Request(
            method, path, {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        )
        self.requests.append(request)
        fault = (next(self._faults, None) if self._where(request) else None) or Fault()
        data = b"" if fault.then == "hang" else await self._hear(request, reader, writer)
        lines = [line for line in lines if not line.lower().startswith("expect:")]
        if fault.before is not None:
            await asyncio.to_thread(fault.before)
        await asyncio.sleep(fault.delay)
        if fault.status:
            body = f"<Error><Code>{fault.code}</Code><Message>spoiled</Message></Error>".encode()
            start = f"HTTP/1.1 {fault.status} Spoiled\r\n".encode()
        elif fault.ends_before_the_answer():
            await self._end(fault.then, reader, writer)
        else:
            start, body = await self._ask(method, path, lines, data)
        body = body[: len(body) - fault.cut]
        if method != "HEAD":
            start += f"Content-Length: {len(body)}\r\n".encode()
        send = self._stall if fault.then == "stall" and fault.after is not None else self._send
        await send(start + b"\r\n", body, fault, writer)
        if fault.after is not None and fault.then != "stall":
            await self._end(fault.then, reader, writer)

    async def _send(self, head: bytes, body: bytes, fault: Fault, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for part in self._parts(body[: fault.after], fault.rate):
            writer.write(part)
            await writer.drain()
            if fault.rate:
                await asyncio.sleep(len(part) / fault.rate)

    async def _stall(self, head: bytes, body: bytes, fault: Fault, writer: asyncio.StreamWriter) -> None:
        if fault.after >= 0:
            writer.write(head + body[: fault.after])
            head, body = b"", body[fault.after :]
        await asyncio.sleep(fault.stall_seconds)
        writer.write(head + body)
        await writer.drain()

    async def _hear(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if request.headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.headers.get("transfer-encoding", "") != "chunked":
            return await reader.readexactly(int(request.headers.get("content-length", 0)))
        data = b""
        while size := int(await reader.readline(), 16):
            data += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return data

    async def _ask(self, method: str, path: str, lines: list[str], data: bytes) -> tuple[bytes, bytes]:
        """Asks the server by HTTP/1.0, so that it answers without chunks and then closes."""
        address = urlsplit(self.server)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        if any(line.lower() == "transfer-encoding: chunked" for line in lines):
            lines = [line for line in lines if not line.lower().startswith("transfer-encoding:")]
            lines.append(f"Content-Length: {len(data)}")
        try:
            writer.write("\r\n".join([f"{method} {path} HTTP/1.0", *lines, "", ""]).encode("latin-1") + data)
            head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n")
            body = await reader.read()
        finally:
            writer.close()
        dropped = rb"(?im)^connection:.*\r\n" if method == "HEAD" else rb"(?im)^(connection|content-length):.*\r\n"
        return re.sub(dropped, b"", head).replace(b"HTTP/1.0", b"HTTP/1.1", 1), body

    def _parts(self, body: bytes, rate: int) -> Iterator[bytes]:
        size = max(1, rate // 20) if rate else 1 << 18
        for begin in range(0, len(body), size):
            yield body[begin : begin + size]

    async def _end(self, how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "hang":
            await reader.read(1)
        else:
            await asyncio.sleep(0.05)  # so that what was sent gets there first
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        raise Ended


class ForwardProxy(FaultProxy):
    """A proxy as HTTP_PROXY and HTTPS_PROXY name one: any host that is asked for is ``server``, or ``tls_server``."""

    def __init__(self, server: str, tls_server: str = "") -> None:
        super().__init__(server)
        self.tls_server = tls_server
        self.tunnels: list[str] = []

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not head.startswith(b"CONNECT "):
            await super()._answer(head, reader, writer)
            return
        self.tunnels.append(head.split()[1].decode())
        address = urlsplit(self.tls_server)
        there, back = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer))
        raise Ended

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while part := await source.read(1 << 16):
                target.write(part)
                await target.drain()
        finally:
            target.close()
