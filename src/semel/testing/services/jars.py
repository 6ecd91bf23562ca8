"""Jars from Maven Central, fetched once by the Ivy that PySpark's wheel carries."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from semel.testing.services.processes import ServiceUnavailable, java, package_folder

# The connector's token provider did not resolve in 4.2.0 when this was written; 4.0.0 of it
# serves every Spark 4.  Hadoop and slf4j are in Spark's own class path.
_MODULES = """\
<ivy-module version="2.0">
  <info organisation="semel" module="test-jars"/>
  <configurations><conf name="connector"/><conf name="broker"/><conf name="jdbc"/></configurations>
  <dependencies>
    <dependency org="org.apache.spark" name="spark-sql-kafka-0-10_2.13" rev="4.2.0"
                conf="connector->default">
      <exclude org="org.apache.hadoop"/><exclude org="org.slf4j"/>
    </dependency>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="4.3.0" conf="broker->default"/>
    <dependency org="org.postgresql" name="postgresql" rev="42.7.8" conf="jdbc->master"/>
    <override org="org.apache.spark" module="spark-token-provider-kafka-0-10_2.13" rev="4.0.0"/>
  </dependencies>
</ivy-module>
"""


def services_folder() -> Path:
    """Say where downloads are kept: SEMEL_SERVICES_DIR, or a cache in the user's home."""
    return Path(os.environ.get("SEMEL_SERVICES_DIR") or Path.home() / ".cache" / "semel")


FETCHED_MB: Final = 55
"""How much the first use downloads."""

TELL_SECONDS: Final = 5.0
"""How often `fetch_jars` tells how far it is."""


def jars_folder() -> Path:
    """Return the folder of the jars, which exists once they were fetched."""
    digest = hashlib.sha256(_MODULES.encode()).hexdigest()[:12]
    return services_folder() / f"jars-{digest}"


def first_download() -> str | None:
    """Say what `fetch_jars` will fetch, with its size, or None where it is here already."""
    if jars_folder().is_dir():
        return None
    return f"fetching Kafka once ({FETCHED_MB} MB) into {jars_folder()} …"


def fetch_jars(tell: Callable[[str], object] = lambda _: None) -> Path:
    """Return the folder with `connector/`, `broker/` and `jdbc/`; fetch it if it is new.

    *tell* is called now and then with how much has come.  Two processes may call this at once:
    one fetches, the other waits.  A fetch that was interrupted leaves nothing that could be taken
    for a whole one.
    """
    wanted = jars_folder()
    if wanted.is_dir():
        return wanted
    with _locked(services_folder() / "jars.lock"):
        if not wanted.is_dir():
            fetched = services_folder() / "fetching"
            shutil.rmtree(fetched, ignore_errors=True)
            _retrieve(fetched, tell)
            (fetched / "jars").rename(wanted)
            shutil.rmtree(fetched)
    return wanted


def connector_jars() -> list[str]:
    """List the jars of Spark's Kafka connector, for `spark.jars`."""
    jars = sorted((fetch_jars() / "connector").glob("*.jar"))
    # Spark has its own Scala, and two of them in one JVM do not agree.
    return [str(jar) for jar in jars if not jar.name.startswith("scala-library")]


def jdbc_jars() -> list[str]:
    """List the jars of PostgreSQL's JDBC driver, for `spark.jars`."""
    return [str(jar) for jar in sorted((fetch_jars() / "jdbc").glob("*.jar"))]


def _retrieve(folder: Path, tell: Callable[[str], object]) -> None:
    cache = folder / "ivy"
    cache.mkdir(parents=True)
    modules = folder / "modules.xml"
    modules.write_text(_MODULES)
    spark_jars = package_folder("pyspark", extra="demo") / "jars"
    ivy = next(spark_jars.glob("ivy-*.jar"), None)
    if ivy is None:
        raise ServiceUnavailable(f"there is no ivy-*.jar in {spark_jars}: pip install 'pyspark>=4'")
    pattern = f"{folder}/jars/[conf]/[artifact]-[revision].[ext]"
    command = [java(), "-jar", str(ivy), "-cache", str(cache), "-ivy", str(modules)]
    said = folder / "ivy.log"
    with said.open("w") as output:
        fetching = subprocess.Popen(
            [*command, "-retrieve", pattern, "-warn"], stdout=output, stderr=output
        )
        while _runs(fetching):
            tell(f"{_megabytes(cache):.0f} of {FETCHED_MB} MB")
    if fetching.returncode != 0 or not (folder / "jars" / "broker").is_dir():
        trouble = said.read_text().strip().splitlines()[-5:]
        raise ServiceUnavailable(
            "the jars of Kafka could not be fetched; a connection to Maven Central is needed "
            "once: " + " | ".join(trouble)
        )


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a process, for some seconds; return whether it goes on."""
    try:
        process.wait(TELL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _megabytes(folder: Path) -> float:
    # A file may get its final name between the two looks at it.
    sizes = (os.path.getsize(file) for file in folder.rglob("*") if file.is_file())
    with suppress(FileNotFoundError):
        return min(sum(sizes) / 1e6, FETCHED_MB)
    return 0.0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, or with the process
        yield
