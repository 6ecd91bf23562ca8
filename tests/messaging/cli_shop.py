"""A database with a service's messages, and a module with its consumer, for commands."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from semel.memory.broker import MemoryBroker
from semel.messaging.failure import NonRetryableMessageError
from tests.messaging.cli_books import CliBooks
from tests.messaging.replay_world import Service

MODULE = "shop_of_replays"
CONSUMER = ("--handler", f"{MODULE}:billing")


class Shop(CliBooks):
    """A database with a service's messages, and a module with its consumer."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(path)
        monkeypatch.setenv("SEMEL_DATABASE", self.url)
        self.broken: set[str] = set()
        self.broker = MemoryBroker({"payments": 1})
        self.module = types.ModuleType(MODULE)
        self.offer(self.service(None))
        monkeypatch.setitem(sys.modules, MODULE, self.module)

    def service(self, world: Any, *settings: Any) -> Service:
        service = Service(world, *settings)
        service.broker = self.broker
        service.broken = self._break
        return service

    def offer(self, service: Service) -> None:
        vars(self.module).update(
            billing=service.consumer, reader=self.broker.reader, number=7, broker=self.broker
        )

    def _break(self, message: Any) -> None:
        if message.id in self.broken:
            raise NonRetryableMessageError("no such account")

    def deliver(self, *ids: str, key: str | None = None, settings: Any = None) -> None:
        async def work(world: Any) -> None:
            service = await self.service(world, *([settings] if settings else [])).open()
            self.offer(service)
            await service.deliver(*ids, key=key)

        self.fill(work)

    def bury(self, *ids: str) -> None:
        self.broken = set(ids)
        self.deliver(*ids)
        self.broken = set()

    def paid(self) -> list[str]:
        return sorted(self.fill(lambda world: self.service(world).paid()))
