"""One Kafka broker that is also its own controller (KRaft)."""

from __future__ import annotations

import base64
import importlib
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semel.testing.services.jars import fetch_jars
from semel.testing.services.processes import (
    Lifetime,
    ServiceUnavailable,
    StopMode,
    free_port,
    java,
    listens,
)
from semel.testing.services.proxy import CutProxy

# One node, so every internal topic has one replica; few partitions, so it starts quickly.  After
# a crash, the controller admits the broker again only when its last session has run out.  A dead
# group member is noticed after seconds, not after a minute.
_SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CUT://127.0.0.1:{cut_port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CUT://127.0.0.1:{proxy_port}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CUT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/log
auto.create.topics.enable=false
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=3000
group.consumer.min.heartbeat.interval.ms=100
group.consumer.heartbeat.interval.ms=300
"""


class KafkaServer(Lifetime):
    """One broker with no topics; they are made on request only.

    `stop("immediate")` crashes it: the next `start` recovers its log.  Clients that connect by
    `cut_bootstrap` go through `proxy`, which can cut them off.
    """

    def __init__(
        self, directory: Path | str | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """*settings* are added to those of the broker, when its folder is new."""
        super().__init__(directory)
        self._settings = dict(settings or {})
        self.port = free_port()
        self._controller_port = free_port()
        self._cut_port = free_port()
        self.proxy = CutProxy(self._cut_port)
        """Stands before a second listener, and cuts its clients off when a test says so."""

    @property
    def bootstrap(self) -> str:
        """The value of `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def cut_bootstrap(self) -> str:
        """The same broker, behind `proxy`."""
        return f"127.0.0.1:{self.proxy.port}"

    def stop(self, mode: StopMode = "fast") -> None:
        """End the broker and close the proxy; the files stay."""
        self.proxy.stop()
        super().stop(mode)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic and return when it is there."""
        client = self._client()
        topic = client.NewTopic(name, num_partitions=partitions, replication_factor=1)
        admin = client.AdminClient(self._configuration())
        admin.create_topics([topic])[name].result(30)

    def _launch(self) -> None:
        client = self._client()
        classes = f"{fetch_jars() / 'broker'}/*"
        settings = self.folder / "server.properties"
        if not settings.exists():
            self._format(classes, settings)
        command = [java(), "-Xmx512m", "-cp", classes, "kafka.Kafka", str(settings)]
        self._spawn("kafka", command)
        self._wait_until(lambda: listens(self.port), "Kafka", seconds=90)
        # The port opens before the controller has admitted the broker.
        admin = client.AdminClient(self._configuration())
        self._wait_until(lambda: bool(admin.list_topics(timeout=30).brokers), "Kafka", seconds=30)
        self.proxy.start()

    def _format(self, classes: str, settings: Path) -> None:
        text = _SETTINGS.format(
            folder=self.folder,
            port=self.port,
            cut_port=self._cut_port,
            proxy_port=self.proxy.port,
            controller_port=self._controller_port,
        )
        unfinished = settings.with_suffix(".new")
        unfinished.write_text(text + "".join(f"{k}={v}\n" for k, v in self._settings.items()))
        # The first bit is 0, or the id could begin with "-" and be taken for an option.
        number = uuid.uuid4().int >> 1
        cluster = base64.urlsafe_b64encode(number.to_bytes(16, "big")).decode().rstrip("=")
        # A JVM that lives for a second should not optimise.
        tool = [java(), "-XX:TieredStopAtLevel=1", "-cp", classes, "kafka.tools.StorageTool"]
        done = subprocess.run(
            [*tool, "format", "-t", cluster, "-c", str(unfinished)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServiceUnavailable(f"Kafka's storage could not be formatted: {done.stderr}")
        unfinished.rename(settings)

    def _configuration(self) -> dict[str, Any]:
        # Errors are raised; the client's own log would write into a demo's output.
        return {"bootstrap.servers": self.bootstrap, "log_level": 2}

    def _client(self) -> Any:
        try:
            return importlib.import_module("confluent_kafka.admin")
        except ImportError as missing:
            raise ServiceUnavailable(
                "confluent-kafka is not installed: pip install 'semel[kafka]'"
            ) from missing
