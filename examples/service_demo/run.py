"""One run: records are sent, a service handles them, is killed and started again."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer, TopicPartition

from examples.demo.run import DemoFailed
from examples.demo.screen import LINE_SECONDS, LineScreen
from examples.service_demo.traffic import Plan, Sender
from semel.testing import services

PARTITIONS: Final = 2
OUTAGE_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.02
PATIENCE_SECONDS: Final = 120.0
"""For a whole run, beyond the time in which records are sent."""


class Variant(StrEnum):
    """Who handles the messages."""

    SEMEL = "semel"
    PLAIN = "plain"


class Run:
    """One variant's run; the service goes on until `stop`."""

    def __init__(
        self,
        variant: Variant,
        plan: Plan,
        servers: tuple[services.KafkaServer, services.PostgresServer],
        folder: Path,
        screen: LineScreen,
    ) -> None:
        self.kafka, self.postgres = servers
        self.url = self.postgres.create_database(variant)
        self._variant, self._plan, self._folder, self._screen = variant, plan, folder, screen
        self._topic = f"payments-{variant}"
        self._service: services.Child | None = None
        self._began = time.monotonic()
        self._ends = self._began + plan.seconds + PATIENCE_SECONDS
        self._starts = 0
        self._next_line = LINE_SECONDS
        self.kafka.create_topic(self._topic, PARTITIONS)

    def note(self, heading: str, text: str) -> None:
        """Add a line."""
        self._screen.note(time.monotonic() - self._began, heading, text)

    def start(self, release: str = "1") -> None:
        """Start the service as a process of its own."""
        self._starts += 1
        module = "service" if self._variant is Variant.SEMEL else "plain"
        self._service = services.Child(
            [sys.executable, "-m", f"examples.service_demo.{module}"],
            self._folder / f"{self._variant}.log",
            {**self.environment, "RELEASE": release},
        )
        self.note("started", f"service {self._starts}, process {self._service.pid}")

    @property
    def environment(self) -> dict[str, str]:
        """Where the service works."""
        return {"KAFKA": self.kafka.bootstrap, "DATABASE_URL": self.url}

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """End the service."""
        if self._service is not None:
            self._service.end(with_signal)
            self._service = None

    def run(self) -> None:
        """Send everything, with kills and an outage; return when the group is at the end.

        Raises:
            DemoFailed: the service ended by itself, or is stuck; names its log.
        """
        sender = Sender(self.kafka.bootstrap, self._topic, self._plan)
        choose = random.Random(f"moments {self._plan.seed}")
        incidents = self._plan.incidents()
        self.start()
        for number, (what, share) in enumerate(incidents, start=1):
            before, ceiling = self.effects(), number / (len(incidents) + 1)
            self._send_until(
                sender,
                ceiling,
                lambda share=share, before=before: (
                    sender.sent >= int(share * len(sender.records)) and self.effects() > before
                ),
            )
            moment = time.monotonic() + choose.uniform(0.0, 0.5)
            self._send_until(sender, ceiling, lambda moment=moment: time.monotonic() >= moment)
            if what == "kill":
                self.stop(signal.SIGKILL)
                self.note("kill -9", f"service {self._starts}, {self.effects():,} effects so far")
                self.start()
            else:
                self.postgres.stop("immediate")
                self.note("outage", f"PostgreSQL crashes, and is away for {OUTAGE_SECONDS:g} s")
                back = time.monotonic() + OUTAGE_SECONDS
                self._send_until(sender, ceiling, lambda back=back: time.monotonic() >= back)
                self.postgres.start()
                self.note("restarted", "PostgreSQL is back")
        self._send_until(sender, 1.0, lambda: sender.is_done)
        self.wait_until(self._is_at_the_end)
        self.note("done", f"the group has committed all {sender.sent:,} records")

    def _send_until(self, sender: Sender, share: float, met: Callable[[], bool]) -> None:
        def ready() -> bool:
            elapsed = time.monotonic() - self._began
            sender.send(elapsed, share)
            if elapsed > self._next_line:
                self._next_line = elapsed + LINE_SECONDS
                self.note("", f"{sender.sent:,} records sent")
            return met()

        self.wait_until(ready)

    def wait_until(self, met: Callable[[], bool]) -> None:
        """Wait for a condition, as long as the service lives."""
        while not met():
            if self._service is not None and not self._service.is_alive():
                raise DemoFailed(f"the service ended by itself: see {self._service.log}")
            if time.monotonic() > self._ends:
                raise DemoFailed(f"the service is stuck: see {self._folder}/{self._variant}.log")
            time.sleep(LOOK_SECONDS)

    def ask(self, statement: str) -> list[tuple]:
        """Ask the service's database."""
        with psycopg.connect(self.url) as connection:
            return connection.execute(statement).fetchall()

    def effects(self) -> int:
        """Count the rows that the service wrote."""
        return self.ask("SELECT count(*) FROM entries")[0][0]

    def _is_at_the_end(self) -> bool:
        group = {"bootstrap.servers": self.kafka.bootstrap, "group.id": f"billing-{self._variant}"}
        client = Consumer(group)
        try:
            places = [TopicPartition(self._topic, number) for number in range(PARTITIONS)]
            ends = [client.get_watermark_offsets(place, timeout=10)[1] for place in places]
            return ends == [place.offset for place in client.committed(places, timeout=10)]
        finally:
            client.close()
