"""A pooler as small as one can be: it lends server sessions by transaction, or for good."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Literal, Self

import psycopg

# https://www.postgresql.org/docs/current/protocol-message-formats.html
_WANTS_ENCRYPTION = (80877103, 80877104)


class Pooler:
    """Stands before the server of *target*, at `port`; for statements, not for COPY.

    It asks its clients for no password, and has the one in *target*.
    """

    def __init__(self, target: str, mode: Literal["session", "transaction", "rotating"]):
        self.target = target
        self.mode = mode
        self._sessions: list[psycopg.Connection] = []
        self._idle: list[socket.socket] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._lock:
            self._is_closed = True
            for server in (*self._idle, *self._sessions):
                server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with client, contextlib.suppress(OSError, EOFError):
            startup = self._greet(client)
            while True:
                kind, body = _message(client)
                if kind == b"X":
                    break
                server = server or self._take(startup)
                server.sendall(_packed(kind, body))
                if kind not in b"QS":
                    continue
                is_idle = _relay(server, client)
                if is_idle and self.mode != "session":
                    self._give_back(server)
                    server = None
        if server is not None:
            server.close()

    def _greet(self, client: socket.socket) -> bytes:
        while True:
            (length,) = struct.unpack("!i", _exactly(client, 4))
            startup = _exactly(client, length - 4)
            if struct.unpack("!i", startup[:4])[0] not in _WANTS_ENCRYPTION:
                break
            client.sendall(b"N")
        settings = {"server_version": "18.0", "client_encoding": "UTF8", "TimeZone": "UTC"}
        client.sendall(_packed(b"R", struct.pack("!i", 0)))
        for name, value in settings.items():
            client.sendall(_packed(b"S", f"{name}\0{value}\0".encode()))
        client.sendall(_packed(b"K", os.urandom(8)) + _packed(b"Z", b"I"))
        return startup

    def _take(self, startup: bytes) -> socket.socket:
        with self._lock:
            if self._idle and not (self.mode == "rotating" and len(self._idle) < 2):
                return self._idle.pop(0 if self.mode == "rotating" else -1)
        # Four bytes of the version, then names and values, each of them ended by a zero.
        said = startup[4:].decode().split("\0")
        given = dict(zip(said[::2], said[1::2], strict=False))
        settings = {name: given[name] for name in ("application_name", "options") if name in given}
        session = psycopg.connect(self.target, **settings)
        with self._lock:
            self._sessions.append(session)
        server = socket.socket(fileno=os.dup(session.fileno()))
        server.setblocking(True)
        return server

    def _give_back(self, server: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                server.close()
            else:
                self._idle.append(server)


def _relay(server: socket.socket, client: socket.socket) -> bool:
    """Pass the answer on; tell whether no transaction is open after it."""
    while True:
        kind, body = _message(server)
        client.sendall(_packed(kind, body))
        if kind == b"Z":
            return body == b"I"


def _message(of: socket.socket) -> tuple[bytes, bytes]:
    kind = _exactly(of, 1)
    (length,) = struct.unpack("!i", _exactly(of, 4))
    return kind, _exactly(of, length - 4)


def _packed(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _exactly(of: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = of.recv(count - len(got))
        if not more:
            raise EOFError
        got += more
    return got
