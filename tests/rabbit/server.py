"""One RabbitMQ node, of the server that the system's package installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from semel.testing.services.processes import Lifetime, ServiceUnavailable, free_port, listens

# Debian's command on PATH changes the user first; this one runs as its caller.
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitServer(Lifetime):
    """A node of its own on loopback, with no queues; `stop("immediate")` crashes it."""

    def __init__(self, directory: Path | str | None = None) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._between_nodes = free_port()
        self._names = free_port()

    @staticmethod
    def is_installed() -> bool:
        """Return whether the system has a RabbitMQ server; no package of Python brings it."""
        return _SERVER.exists() and shutil.which("epmd") is not None

    @property
    def url(self) -> str:
        """The value for `RabbitBroker`."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def _launch(self) -> None:
        if not self.is_installed():
            raise ServiceUnavailable("there is no RabbitMQ: apt install rabbitmq-server")
        folder = str(self.folder)
        names = {"ERL_EPMD_PORT": str(self._names), "ERL_EPMD_ADDRESS": "127.0.0.1"}
        # Erlang would start this one itself, as a daemon that outlives the node.
        self._spawn("epmd", [shutil.which("epmd") or "epmd"], names)
        self._wait_until(lambda: listens(self._names), "epmd", seconds=30)
        environment = names | {
            "HOME": folder,
            "RABBITMQ_NODENAME": f"semel{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._between_nodes),
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq",
        }
        self._spawn("rabbitmq", [str(_SERVER)], environment)
        self._wait_until(lambda: listens(self.port), "RabbitMQ", seconds=90)
