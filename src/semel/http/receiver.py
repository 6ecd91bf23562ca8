"""The reference receiver: an ASGI application to mount under a path of a service.

    app.mount("/semel", receiver("sqlite:///received.db", allow=knows_the_token))

The middleware of the service runs before; its dependencies, as FastAPI's, do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from semel.errors import require
from semel.http.client import EPOCH
from semel.http.openapi import CALLS, document
from semel.http.store import Apply, ReceiverStore, Refusal, keep_rows
from semel.pipeline.txn import Scope, checked_name

requests: Any = require("starlette.requests", "receiver")
responses: Any = require("starlette.responses", "receiver")
routing: Any = require("starlette.routing", "receiver")
applications: Any = require("starlette.applications", "receiver")
concurrency: Any = require("starlette.concurrency", "receiver")

# More than a chunk of the sink, less than what a process can keep for each client.
LARGEST_BODY_BYTES: Final = 64 << 20

_TXN: Final = re.compile(r"[0-9a-f]{20}\.g\d{1,18}\.b\d{1,18}\.[A-Za-z0-9_-]{1,64}")
_SLUG: Final = re.compile(r"[0-9a-f]{20}")
_TASK: Final = re.compile(r"[A-Za-z0-9-]{1,80}")


Allow: TypeAlias = Callable[[Mapping[str, str]], bool]
"""Gets the headers of a request, their names in lower case; says whether it may be answered."""


def receiver(
    url: str,
    apply: Apply = keep_rows,
    *,
    validate: Apply | None = None,
    allow: Allow | None = None,
) -> Any:
    """Make the ASGI application of a receiver with its tables in the database *url*.

    ``apply(connection, cycle, rows)`` writes the rows of a cycle with the connection of the
    commit's transaction; without it, they go into the table ``semel_received``.
    ``validate`` gets the same before the decision, and may be the same function: what it writes
    is rolled back, and what it raises refuses the rows with 422 while the cycle can be aborted.
    ``allow(headers)`` checks the login of each request: 401 where it is false.
    """
    store = ReceiverStore(url, apply, validate)
    named = [
        (call.path.replace("{number}", "{number:int}"), call.method, HANDLERS[call.handler])
        for call in CALLS
    ]
    routes = [
        _route(path, method, partial(handle, store), allow)
        for path, method, handle in [*named, ("/openapi.json", "GET", _document)]
    ]
    app = applications.Starlette(routes=routes)
    app.state.store = store
    return app


class _Call:
    """One request, with its parameters checked."""

    def __init__(self, request: Any, body: bytes, content: Any) -> None:
        self.body = body
        self.content = content
        self.encoding = request.headers.get("Content-Encoding", "none")
        self.epoch = _whole(request.headers.get(EPOCH, "0"))
        path = request.path_params
        self.txn = _checked(_TXN, path.get("txn"))
        self.scope = _checked(_SLUG, path.get("scope"))
        self.task = _checked(_TASK, path.get("task"))
        self.number = path.get("number", 0)


Act: TypeAlias = Callable[[], Any]
Handler: TypeAlias = Callable[[ReceiverStore, _Call], Act]
"""Reads a request, and returns what is to be done for it."""


def _route(path: str, method: str, handle: Callable[[_Call], Act], allow: Allow | None) -> Any:
    async def endpoint(request: Any) -> Any:
        if allow is not None and not allow(request.headers):
            return responses.JSONResponse({"reason": "log in"}, 401)
        try:
            body = await _body(request)
            act = handle(
                _Call(request, body, json.loads(body) if method == "POST" and body else {})
            )
        except Refusal as refusal:
            return _refused(refusal)
        except (KeyError, TypeError, ValueError) as error:
            return _refused(Refusal(400, f"not understood: {error}"))
        try:
            # What the service's own code raises is no refusal: 500, and the sink tries again.
            return responses.JSONResponse(await concurrency.run_in_threadpool(act))
        except Refusal as refusal:
            return _refused(refusal)

    typed: Callable[[Any], Awaitable[Any]] = endpoint
    return routing.Route(path, typed, methods=[method])


def _refused(refusal: Refusal) -> Any:
    return responses.JSONResponse({"reason": refusal.reason}, refusal.status)


async def _body(request: Any) -> bytes:
    size, parts = _whole(request.headers.get("Content-Length", "0")), []
    if size <= LARGEST_BODY_BYTES:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > LARGEST_BODY_BYTES:
                break
            parts.append(part)
        else:
            return b"".join(parts)
    raise Refusal(413, f"a request has at most {LARGEST_BODY_BYTES} bytes")


def _checked(pattern: re.Pattern[str], value: str | None) -> str:
    if value is None:
        return ""
    if not pattern.fullmatch(value):
        raise Refusal(400, f"{value[:80]!r} is not a valid name")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise Refusal(400, f"{text[:80]!r} is not a whole number")
    return int(text)


def _put_chunk(store: ReceiverStore, call: _Call) -> Act:
    if call.encoding not in ("gzip", "none"):
        raise Refusal(415, f"encoding {call.encoding[:40]!r} is not known; send gzip or none")
    where = call.txn, call.task, call.number
    return lambda: {"digest": store.put_chunk(*where, call.body, call.encoding)}


def _drop_task(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.drop_task, call.txn, call.task)


def _prepare(store: ReceiverStore, call: _Call) -> Act:
    chunks = [[str(t), int(n), str(d), int(r)] for t, n, d, r in call.content["chunks"]]
    return partial(store.prepare, call.txn, call.epoch, call.content["token"], chunks)


def _commit(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.commit, call.txn, call.content["token"])


def _abort(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.abort, call.txn)


def _tidy(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.tidy, call.txn)


def _look_up(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.look_up, call.txn)


def _pending(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.pending, call.scope)


def _fence(store: ReceiverStore, call: _Call) -> Act:
    return partial(store.fence, call.scope, int(call.content["epoch"]), _about(call))


def _rename(store: ReceiverStore, call: _Call) -> Act:
    to = _checked(_SLUG, str(call.content["to"]))
    return partial(store.rename, call.scope, to, call.epoch, _about(call))


def _about(call: _Call) -> dict[str, str]:
    about = {name: str(call.content[name]) for name in ("ledger", "app", "query", "sink")}
    # Raises what a sink that lists the scopes would raise.
    Scope(about["ledger"], about["app"], about["query"])
    checked_name("sink", about["sink"])
    return about


def _scopes(store: ReceiverStore, call: _Call) -> Act:
    return store.scopes


def _scope(store: ReceiverStore, call: _Call) -> Act:
    def find() -> Any:
        return next((one for one in store.scopes() if one["slug"] == call.scope), {"mark": None})

    return find


def _document(store: ReceiverStore, call: _Call) -> Act:
    return document


HANDLERS: Final[Mapping[str, Handler]] = {
    handle.__name__: handle
    for handle in (
        *(_put_chunk, _drop_task, _prepare, _commit, _abort, _tidy, _look_up),
        *(_pending, _fence, _rename, _scopes, _scope),
    )
}
"""What answers each request of the protocol."""
