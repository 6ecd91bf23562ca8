"""A schema registry in this process: the few calls that Confluent's client makes."""

from __future__ import annotations

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from semel.testing.services import ServiceUnavailable

NOT_FOUND = (404, {"error_code": 40403, "message": "Schema not found"})


class SchemaRegistry:
    """Schemas in memory, served on loopback; it can be stopped, and started at the same port.

    Raises:
        ServiceUnavailable: the packages of semel[schema-registry] are not installed.
    """

    def __init__(self) -> None:
        try:
            from confluent_kafka.schema_registry import avro, json_schema, protobuf  # noqa: F401
        except ModuleNotFoundError as missing:
            raise ServiceUnavailable(f"{missing.name} is in semel[schema-registry]") from missing
        self.schemas: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.instead: tuple[int, Any] | None = None
        """What it answers instead of schemas."""

        self.answering = threading.Event()
        """Cleared: it takes questions, and says nothing."""

        self.answering.set()
        self._port = 0
        self.start()

    def start(self) -> None:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(lambda path: registry.look_up(path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(lambda path: registry.register(path[1], body))

            def _answer(self, answer: Any) -> None:
                path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
                registry.asked.append(self.path)
                registry.answering.wait(30)
                status, found = registry.instead or answer(path)
                text = json.dumps(found).encode() if isinstance(found, dict) else found
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.answering.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def look_up(self, path: list[str]) -> tuple[int, Any]:
        match path:
            case ["schemas", "ids", number] if 0 < int(number) <= len(self.schemas):
                return 200, self.schemas[int(number) - 1]
            case ["schemas", "guids", guid]:
                found = [schema for schema in self.schemas if schema["guid"] == guid]
                return (200, found[0]) if found else NOT_FOUND
            case ["subjects", subject, "versions", version]:
                found = [schema for schema in self.schemas if schema["subject"] == subject]
                return (200, found[int(version) - 1]) if found else NOT_FOUND
        return NOT_FOUND

    def register(self, subject: str, body: dict[str, Any]) -> tuple[int, Any]:
        version = 1 + sum(schema["subject"] == subject for schema in self.schemas)
        number, guid = len(self.schemas) + 1, str(uuid.uuid4())
        self.schemas.append(
            {**body, "id": number, "guid": guid, "subject": subject, "version": version}
        )
        return 200, self.schemas[-1]
