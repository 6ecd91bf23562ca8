"""The requests to a receiver: repeated while that may help, and answered by one table."""

from __future__ import annotations

import random
import ssl
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from semel.errors import Misuse, Permanent, Retryable, reason_of, require

httpx: Any = require("httpx", "http")

EPOCH: Final = "Semel-Epoch"
KEY: Final = "Idempotency-Key"

# A receiver may ask for more; a longer wait is the next attempt's.
_LONGEST_WAIT_SECONDS: Final = 10.0


class Response(StrEnum):
    """What the sink does after an answer."""

    DONE = "done"
    REFUSED = "refused"
    """Never again: the receiver's state or the request is wrong."""

    LATER = "later"
    """Repeat the request after a while; each may be repeated."""


ANSWERS: Final[Mapping[int, tuple[Response, str]]] = {
    200: (Response.DONE, "done, or done before"),
    201: (Response.DONE, "stored"),
    204: (Response.DONE, "done"),
    400: (Response.REFUSED, "the receiver does not understand the request"),
    401: (Response.REFUSED, "the receiver wants other credentials"),
    403: (Response.REFUSED, "the receiver forbids it"),
    404: (Response.REFUSED, "there is no receiver at this URL"),
    408: (Response.LATER, "the receiver waited too long for the request"),
    409: (Response.REFUSED, "it contradicts what the receiver has"),
    410: (Response.REFUSED, "the receiver does not hold it: never prepared, aborted, or lost"),
    413: (Response.REFUSED, "a chunk is too large for the receiver; lower chunk_bytes"),
    422: (Response.REFUSED, "the receiver refuses the rows"),
    425: (Response.LATER, "too early"),
    429: (Response.LATER, "too many requests"),
    501: (Response.REFUSED, "the receiver cannot do it"),
}
"""Any other answer of 500 and above is `LATER`, and any other at all `REFUSED`."""


def meaning(
    status: int, answers: Mapping[int, tuple[Response, str]] = ANSWERS
) -> tuple[Response, str]:
    """Return what an HTTP status means."""
    later = Response.LATER if status >= 500 else Response.REFUSED
    return answers.get(status, (later, "an unexpected answer"))


class ReceiverRefused(Permanent):
    """The receiver will never do it; its own words are in the message."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


Headers = Callable[[], Mapping[str, str]]
"""Returns the headers of a request, for example a new bearer token; executors get it pickled."""


@dataclass(eq=False)
class ReceiverClient:
    """The requests to one receiver.  It can be pickled; threads share its connections."""

    url: str
    headers: Headers | None = None
    ca_file: str | None = None
    timeout_seconds: float = 30.0
    tries: int = 4
    _client: Any = field(default=None, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.url, self.headers, self.ca_file, self.timeout_seconds, self.tries

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.url, self.headers, self.ca_file, self.timeout_seconds, self.tries = state
        self._client, self._lock = None, threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        *,
        epoch: int = 0,
        key: str | None = None,
        content: bytes | None = None,
        json: Any = None,
        more: Mapping[str, str] | None = None,
        answers: Mapping[int, tuple[Response, str]] = ANSWERS,
    ) -> Any:
        """Send a request until it is answered, and return the answer's JSON; None if it has none.

        Raises:
            ReceiverRefused: the receiver will never do it.
            Retryable: no answer, or "later", after several tries: it is unknown what happened.
        """
        headers = {EPOCH: str(epoch), **(more or {})}
        if method != "GET":
            # Of this call: a gateway that replays answers by the key must not answer a later
            # abort or fence for the receiver.
            headers[KEY] = key or uuid.uuid4().hex
        reason, wait = "", 0.0
        for number in range(self.tries):
            if number:
                time.sleep(wait)
            # Doubled, and shaken so that the tasks of a stage do not return all at once.
            wait = min(_LONGEST_WAIT_SECONDS, 0.1 * 2**number) * random.uniform(0.5, 1.0)
            try:
                own = self.headers() if self.headers else {}
                answer = self._connections().request(
                    method, path, headers={**own, **headers}, content=content, json=json
                )
            except httpx.TransportError as error:
                reason = f"no answer ({reason_of(error)})"
                continue
            what, words = meaning(answer.status_code, answers)
            if what is Response.DONE:
                is_json = "json" in answer.headers.get("Content-Type", "")
                return answer.json() if answer.content and is_json else None
            reason = f"{answer.status_code}, {words}{_said(answer)}"
            if what is Response.REFUSED:
                raise ReceiverRefused(f"{method} {path}: {reason}", answer.status_code)
            wait = max(wait, _retry_after(answer.headers))
        raise Retryable(f"{method} {path}: {reason}; what happened is unknown until it is asked")

    def _connections(self) -> Any:
        with self._lock:
            if self._client is None:
                # Reading the certificates takes longer than a request.
                is_safe = self.url.startswith("https:")
                verify = ssl.create_default_context(cafile=self.ca_file) if is_safe else False
                self._client = httpx.Client(
                    base_url=self.url, timeout=self.timeout_seconds, verify=verify
                )
                weakref.finalize(self, self._client.close)
            return self._client

    def close(self) -> None:
        """Close the connections; the next request makes new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None


def checked_url(url: str) -> str:
    """Return the URL of a receiver, without a slash at its end.

    Raises:
        Misuse: it is not one, or has credentials in it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Misuse("a receiver's URL begins with http:// or https:// and a host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise Misuse("a receiver's URL has no credentials and no query; give headers a function")
    return url.rstrip("/")


def _said(answer: Any) -> str:
    try:
        reason = answer.json()["reason"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {str(reason)[:300]}"


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return how long a Retry-After header asks to wait, in seconds; 0 without one."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return min(float(text), _LONGEST_WAIT_SECONDS)
    try:
        until, now = (parsedate_to_datetime(one) for one in (text, headers.get("Date", "")))
        return min(max((until - now).total_seconds(), 0.0), _LONGEST_WAIT_SECONDS)
    except (TypeError, ValueError):  # no date, or a clock that is not told
        return 0.0
