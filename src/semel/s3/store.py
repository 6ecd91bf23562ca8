"""The calls to an object store, by boto3, and what its errors mean."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from semel.errors import Misuse, Permanent, Retryable, SemelError, reason_of, require
from semel.secrets import masked

boto3: Any = require("boto3", "s3")
botocore_session: Any = require("botocore.session", "s3")
botocore: Any = require("botocore.exceptions", "s3")
config: Any = require("botocore.config", "s3")

# A store answers each request in tens of milliseconds, however many wait at the same time.
_THREADS: Final = 8

# Errors that may go away by themselves, besides 429 and all of 500 and above.
_PASSING: Final = frozenset(
    {
        "ConditionalRequestConflict",
        "ExpiredToken",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "SlowDown",
    }
)

_MISSING: Final = frozenset(
    {"404", "NoSuchKey", "NoSuchLifecycleConfiguration", "NoSuchUpload", "NotFound"}
)

In = TypeVar("In")
Out = TypeVar("Out")


class Missing(Exception):
    """There is no such object or upload."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    since: float
    """When it was begun, in seconds since 1970."""


@dataclass(eq=False)
class ObjectStore:
    """One prefix of one bucket.  It can be pickled; credentials come from boto3's own chain."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    _client: Any = field(default=None, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.bucket, self.prefix, self.endpoint, self.region

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.bucket, self.prefix, self.endpoint, self.region = state
        self._client, self._lock = None, threading.Lock()

    @property
    def url(self) -> str:
        """The prefix as a URL, without a slash at its end."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def client(self) -> Any:
        """The client of boto3, made when it is first needed; threads share it."""
        with self._lock:
            if self._client is None:
                settings = config.Config(
                    retries={"mode": "standard", "max_attempts": 4},
                    connect_timeout=10,
                    read_timeout=60,
                    max_pool_connections=2 * _THREADS,
                    # Other stores than Amazon's do not know the newer checksums.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    # A store under an address of its own has no host name per bucket.
                    s3={"addressing_style": "path"} if self.endpoint else None,
                )
                # A session of its own: boto3's default session is not safe in threads.
                session = botocore_session.get_session()
                session.register_component("data_loader", _descriptions())
                self._client = boto3.session.Session(botocore_session=session).client(
                    "s3", endpoint_url=self.endpoint, region_name=self.region, config=settings
                )
            return self._client

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def key(self, name: str) -> str:
        """Return the key of a name under the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def call(self, operation: str, name: str | None = None, **arguments: Any) -> Any:
        """Call an operation of boto3 on the bucket, or on the object of a name in it.

        Raises:
            Missing: there is no such object or upload.
            Retryable: no answer, or one that may change.
            Permanent: permissions, credentials, or no such bucket.
        """
        if name is not None:
            arguments["Key"] = self.key(name)
        try:
            return getattr(self.client, operation)(Bucket=self.bucket, **arguments)
        except (botocore.ClientError, botocore.BotoCoreError) as error:
            if isinstance(error, botocore.ClientError) and _code(error)[0] in _MISSING:
                raise Missing(reason_of(error)) from error
            raise _fault(error) from error

    def get(self, name: str) -> Any:
        """Return the content of a JSON object; None if there is none, {} if it is not JSON."""
        try:
            return json.loads(b"".join(self.read(name)))
        except Missing:
            return None
        except ValueError:
            return {}

    def read(self, name: str) -> Iterator[bytes]:
        """Read an object in pieces."""
        with closing(self.call("get_object", name)["Body"]) as body:
            try:
                yield from body.iter_chunks(1 << 20)
            except botocore.BotoCoreError as error:
                raise _fault(error) from error

    def put(self, name: str, content: Any) -> None:
        """Write a JSON object, or replace it."""
        self.call("put_object", name, Body=json.dumps(content, sort_keys=True).encode())

    def put_new(self, name: str, content: Any) -> None:
        """Write a JSON object unless there is one of this name; never replace it.

        A store without conditional PUT replaces it: look first.
        """
        body = json.dumps(content, sort_keys=True).encode()
        try:
            self.call("put_object", name, Body=body, IfNoneMatch="*")
        except Permanent as error:
            status = _code(error.__cause__)[1]
            if status == 501:
                self.put(name, content)
            elif status != 412:
                raise

    def names(self, folder: str) -> list[tuple[str, float]]:
        """List the objects under *folder*, with their times, by their names below it."""
        start, more = self.key(folder), dict[str, str]()
        found: list[tuple[str, float]] = []
        while True:
            page = self.call("list_objects_v2", Prefix=start, **more)
            for item in page.get("Contents", ()):
                found.append((item["Key"].removeprefix(start), item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist count as deleted."""
        for start in range(0, len(names), 1000):
            keys = [{"Key": self.key(name)} for name in names[start : start + 1000]]
            done = self.call("delete_objects", Delete={"Objects": keys, "Quiet": True})
            for first in done.get("Errors", ()):
                raise Retryable(f"{first.get('Key')} was not deleted: {first.get('Code')}")

    def parts(self, name: str, upload_id: str) -> tuple[list[str], int]:
        """Return the tags of the parts of an upload, in their order, and their total size."""
        found: list[Any] = []
        while True:
            last = found[-1]["PartNumber"] if found else 0
            page = self.call("list_parts", name, UploadId=upload_id, PartNumberMarker=last)
            found += page.get("Parts", ())
            if not page.get("IsTruncated"):
                return [part["ETag"] for part in found], sum(part["Size"] for part in found)

    def give_up(self, name: str, upload_id: str) -> None:
        """Abort an upload; one that does not exist counts as aborted."""
        with suppress(Missing):
            self.call("abort_multipart_upload", name, UploadId=upload_id)

    def uploads(self) -> list[Upload]:
        """List the open uploads under the prefix, with names relative to it."""
        start, more = self.key(""), dict[str, str]()
        found: list[Upload] = []
        while True:
            page = self.call("list_multipart_uploads", Prefix=start, **more)
            for item in page.get("Uploads", ()):
                name, since = item["Key"].removeprefix(start), item["Initiated"].timestamp()
                found.append(Upload(name, item["UploadId"], since))
            if not page.get("IsTruncated"):
                return found
            # SeaweedFS 4.48 orders by upload id, gives no key, and answers nothing to one.
            more = {"UploadIdMarker": page["NextUploadIdMarker"]}
            if page.get("NextKeyMarker"):
                more["KeyMarker"] = page["NextKeyMarker"]

    def lifecycle(self) -> list[Mapping[str, Any]]:
        """Return the enabled lifecycle rules that concern objects under the prefix."""
        try:
            rules = self.call("get_bucket_lifecycle_configuration").get("Rules", ())
        except Missing:
            return []
        return [r for r in rules if r.get("Status") == "Enabled" and self._concerns(r)]

    def _concerns(self, rule: Mapping[str, Any]) -> bool:
        chosen = rule.get("Filter") or {}
        start = str(rule.get("Prefix") or chosen.get("And", chosen).get("Prefix") or "")
        return self.key("").startswith(start) or start.startswith(self.key(""))


@cache
def _descriptions() -> Any:
    """Return botocore's descriptions of its services, which take longest to read."""
    return botocore_session.get_session().get_component("data_loader")


def store_of(url: str, endpoint: str | None = None, region: str | None = None) -> ObjectStore:
    """Return the store of a URL such as ``s3://bucket/prefix``.

    Raises:
        Misuse: it is not such a URL.
    """
    parts = urlsplit(url)
    # A secret with a slash in it ends what urlsplit takes for the bucket.
    if parts.scheme not in ("s3", "s3a", "s3n") or not parts.netloc or set("@:") & {*parts.netloc}:
        raise Misuse(f"{masked(url)!r} is not the URL of a prefix; write s3://bucket/prefix")
    if endpoint is not None and "@" in endpoint:
        raise Misuse("endpoint has credentials in it; boto3 finds them in its own chain")
    # The driver's, because executors may have another environment; they need only credentials.
    chain = os.environ
    endpoint = endpoint or chain.get("AWS_ENDPOINT_URL_S3") or chain.get("AWS_ENDPOINT_URL")
    region = region or chain.get("AWS_REGION") or chain.get("AWS_DEFAULT_REGION")
    prefix = parts.path.strip("/")
    if "//" in prefix or ".." in prefix.split("/"):
        raise Misuse(f"{url!r} has an empty or a relative folder in it")
    return ObjectStore(parts.netloc, prefix, endpoint, region)


def together(call: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Make several calls at the same time; the first error is raised when all have ended."""
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from list(pool.map(call, items))


def _code(error: Any) -> tuple[str, int]:
    """Return the code and the HTTP status of an answer of the store."""
    answer = getattr(error, "response", {})
    code = str(answer.get("Error", {}).get("Code", ""))
    return code, int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _fault(error: Exception) -> SemelError:
    if isinstance(error, botocore.ClientError):
        code, status = _code(error)
        reason = f"{getattr(error, 'operation_name', 'S3')} was answered {status} {code}"
        if code in _PASSING or status == 429 or (status >= 500 and status != 501):
            return Retryable(f"{reason}; it may work later")
        return Permanent(f"{reason}: {error.response.get('Error', {}).get('Message', '')}")
    if isinstance(error, botocore.NoCredentialsError | botocore.ParamValidationError):
        return Permanent(f"{reason_of(error)}; boto3 looks for credentials in its own chain")
    return Retryable(f"no answer: {reason_of(error)}")
