"""A TCP proxy that loses a request or a reply, holds a reply, cuts connections or refuses them."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

from semel.testing.services.processes import free_port

_CHUNK_BYTES = 64 * 1024

# How long the server must be silent after its first swallowed bytes before the connection is
# cut: a reply that is already under way to an earlier request must not be taken for all of it.
_QUIET_SECONDS = 0.2


class _Fate(Enum):
    """What becomes of a request and its reply."""

    REQUEST_LOST = "the request never arrives"
    REPLY_LOST = "the reply never comes back"
    REPLY_HELD = "the reply comes back when the test releases it"


class CutProxy:
    """Forwards connections to 127.0.0.1:*target_port* from `port`, until told otherwise."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = free_port()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._links: set[_Link] = set()
        self._pattern: re.Pattern[bytes] | None = None
        self._fate = _Fate.REPLY_LOST
        self._met_its_fate = threading.Event()
        self._released = threading.Event()
        self._cut_off: frozenset[bytes] = frozenset()

    def through(self, url: str) -> str:
        """Return the server's *url* with this proxy's port."""
        return url.replace(f":{self.target_port}", f":{self.port}")

    def start(self) -> Self:
        """Begin to forward."""
        self.accept()
        return self

    def stop(self) -> None:
        """Close the port and every connection."""
        self.refuse()
        self.cut()
        self.release()

    def swallow_reply_to(self, pattern: bytes | re.Pattern[bytes]) -> None:
        """Lose the reply to the next request that contains *pattern*.

        The request reaches the server; once the server has replied, and the client has seen
        nothing of it, their connection is cut.  Other connections go on.
        """
        self._wait_for(pattern, _Fate.REPLY_LOST)

    def hold_reply_to(self, pattern: bytes | re.Pattern[bytes]) -> None:
        """Hold the reply to the next request that contains *pattern*, until `release`.

        The request reaches the server.  What the server sends on this connection meanwhile waits
        behind the reply, and arrives in order.  Other connections go on.
        """
        self._wait_for(pattern, _Fate.REPLY_HELD)

    def release(self) -> None:
        """Send the reply that is held, and what waits behind it."""
        self._released.set()

    def lose_request(self, pattern: bytes | re.Pattern[bytes]) -> None:
        """Cut the connection of the next request that contains *pattern*, before it arrives."""
        self._wait_for(pattern, _Fate.REQUEST_LOST)

    def wait_until_swallowed(self, seconds: float = 30.0) -> bool:
        """Wait until that reply or request is lost or held, and say whether it was."""
        return self._met_its_fate.wait(seconds)

    def _wait_for(self, pattern: bytes | re.Pattern[bytes], fate: _Fate) -> None:
        found = re.compile(re.escape(pattern)) if isinstance(pattern, bytes) else pattern
        with self._lock:
            self._met_its_fate.clear()
            self._released.clear()
            self._pattern, self._fate = found, fate

    def cut(self) -> None:
        """Cut every connection now; new ones are still accepted."""
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.cut()

    def cut_off(self, *patterns: bytes) -> None:
        """Cut every connection whose next request contains one of *patterns*, now and later.

        A client that names itself in its requests, as Kafka's do, is alone in a dead network
        then.  Without a pattern, all connections are forwarded again.
        """
        self._cut_off = frozenset(patterns)

    def refuse(self) -> None:
        """Refuse new connections; the present ones go on."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            # `close` alone would not wake the thread that waits in `accept`.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self.port))
                _in_background(self._serve, self._listener)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # refuse() closed it
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            with self._lock:
                is_refused = self._listener is not listener
                if not is_refused:
                    self._links.add(link)
            if is_refused:
                link.cut()
                return
            link.start()

    def _fate_of(self, before: bytes, chunk: bytes) -> _Fate | None:
        """Return what becomes of a request; only one request has a fate."""
        with self._lock:
            if self._pattern is None:
                return None
            # The pattern may have begun in the chunk before, but must not lie in it altogether:
            # that was an earlier request.
            both = before + chunk
            if all(found.end() <= len(before) for found in self._pattern.finditer(both)):
                return None
            self._pattern = None
            return self._fate

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One connection through the proxy: two sockets and a thread for each direction."""

    def __init__(self, proxy: CutProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._fate: _Fate | None = None
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        _in_background(self._forward_requests)
        _in_background(self._forward_replies)

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._proxy._forget(self)

    def _forward_requests(self) -> None:
        before = b""
        with contextlib.suppress(OSError):
            while chunk := self._client.recv(_CHUNK_BYTES):
                if any(pattern in chunk for pattern in self._proxy._cut_off):
                    break
                # Before the server sees the request, or its reply could slip through.
                fate = self._proxy._fate_of(before, chunk)
                if fate is _Fate.REQUEST_LOST:
                    self._proxy._met_its_fate.set()
                    break
                self._fate = fate or self._fate
                self._server.sendall(chunk)
                before = chunk
        self.cut()

    def _forward_replies(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._server.recv(_CHUNK_BYTES):
                if self._fate is _Fate.REPLY_LOST:
                    self._swallow_the_rest()
                    break
                if self._fate is _Fate.REPLY_HELD:
                    self._fate = None
                    self._proxy._met_its_fate.set()
                    self._proxy._released.wait()
                self._client.sendall(chunk)
        self.cut()

    def _swallow_the_rest(self) -> None:
        self._server.settimeout(_QUIET_SECONDS)
        with contextlib.suppress(OSError):
            while self._server.recv(_CHUNK_BYTES):
                pass
        self._proxy._met_its_fate.set()


def _in_background(target: Callable[..., None], *arguments: socket.socket) -> None:
    threading.Thread(target=target, args=arguments, name="cut-proxy", daemon=True).start()
