"""A relay in a process of its own, with a broker that is a file of fsynced lines.

relay DATABASE-URL FILE [LEASE-SECONDS]
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from semel.messaging.receive.broker import Outgoing
from semel.messaging.send.outbox import MESSAGE_ID_HEADER
from semel.messaging.send.relay import Relay
from semel.sql.database import SqlDatabase

BATCH = 8


class FilePublisher:
    """Appends the id of every message; a batch that was answered is on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        lines = b"".join(message.headers[MESSAGE_ID_HEADER] + b"\n" for message in batch)
        os.write(self._file, lines)
        os.fsync(self._file)
        return [None] * len(batch)

    async def close(self) -> None:
        os.close(self._file)


def main(arguments: Sequence[str]) -> int:
    """Relay until the outbox is empty."""
    url, path, *lease = arguments
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(relay(url, Path(path), float(lease[0]) if lease else 15.0))
    return 0


async def relay(url: str, path: Path, lease_seconds: float) -> None:
    database = SqlDatabase(url)
    publisher = FilePublisher(path)
    try:
        await Relay(database, publisher, batch=BATCH, lease_seconds=lease_seconds).run_until_empty()
    finally:
        await publisher.close()
        await database.close()
