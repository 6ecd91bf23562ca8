"""The reference receiver: an ASGI application to mount under a path of a service.

    app.mount("/semel", receiver("sqlite:///received.db"))

Authentication is the service's: its middleware runs before.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from semel.errors import require
from semel.http.client import EPOCH
from semel.http.openapi import CALLS, document
from semel.http.store import Apply, ReceiverStore, Refusal, keep_rows
from semel.pipeline.txn import ID

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


def receiver(url: str, apply: Apply = keep_rows) -> Any:
    """Make the ASGI application of a receiver with its tables in the database *url*.

    ``apply(connection, cycle, rows)`` writes the rows of a cycle with the connection of the
    commit's transaction; without it, they go into the table ``semel_received``.
    """
    store = ReceiverStore(url, apply)
    routes = [
        _route(
            call.path.replace("{number}", "{number:int}"),
            call.method,
            store,
            HANDLERS[call.handler],
        )
        for call in CALLS
    ]
    app = applications.Starlette(routes=[*routes, _route("/openapi.json", "GET", store, _document)])
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


Handler: TypeAlias = Callable[[ReceiverStore, _Call], Any]


def _route(path: str, method: str, store: ReceiverStore, handle: Handler) -> Any:
    async def endpoint(request: Any) -> Any:
        try:
            body = await _body(request)
            content = await request.json() if method == "POST" and body else {}
            call = _Call(request, body, content)
            found = await concurrency.run_in_threadpool(handle, store, call)
        except Refusal as refusal:
            return responses.JSONResponse({"reason": refusal.reason}, refusal.status)
        except (KeyError, TypeError, ValueError) as error:
            return responses.JSONResponse({"reason": f"not understood: {error}"}, 400)
        return responses.JSONResponse(found)

    endpoint.__name__ = handle.__name__
    typed: Callable[[Any], Awaitable[Any]] = endpoint
    return routing.Route(path, typed, methods=[method])


async def _body(request: Any) -> bytes:
    if _whole(request.headers.get("Content-Length", "0")) > LARGEST_BODY_BYTES:
        raise Refusal(413, f"a request has at most {LARGEST_BODY_BYTES} bytes")
    found: bytes = await request.body()
    if len(found) > LARGEST_BODY_BYTES:
        raise Refusal(413, f"a request has at most {LARGEST_BODY_BYTES} bytes")
    return found


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


def _put_chunk(store: ReceiverStore, call: _Call) -> Any:
    if call.encoding not in ("gzip", "none"):
        raise Refusal(415, f"encoding {call.encoding[:40]!r} is not known; send gzip or none")
    return {"digest": store.put_chunk(call.txn, call.task, call.number, call.body, call.encoding)}


def _drop_task(store: ReceiverStore, call: _Call) -> Any:
    store.drop_task(call.txn, call.task)


def _prepare(store: ReceiverStore, call: _Call) -> Any:
    chunks = [[str(t), int(n), str(d), int(r)] for t, n, d, r in call.content["chunks"]]
    store.prepare(call.txn, call.epoch, call.content["token"], chunks)


def _commit(store: ReceiverStore, call: _Call) -> Any:
    store.commit(call.txn, call.content["token"])


def _abort(store: ReceiverStore, call: _Call) -> Any:
    store.abort(call.txn)


def _tidy(store: ReceiverStore, call: _Call) -> Any:
    store.tidy(call.txn)


def _look_up(store: ReceiverStore, call: _Call) -> Any:
    return store.look_up(call.txn)


def _pending(store: ReceiverStore, call: _Call) -> Any:
    return store.pending(call.scope)


def _fence(store: ReceiverStore, call: _Call) -> Any:
    store.fence(call.scope, int(call.content["epoch"]), _about(call))


def _rename(store: ReceiverStore, call: _Call) -> Any:
    store.rename(call.scope, _checked(_SLUG, str(call.content["to"])), _about(call))


def _about(call: _Call) -> dict[str, str]:
    about = {name: str(call.content[name]) for name in ("ledger", "app", "query", "sink")}
    if not all(ID.fullmatch(value) for value in about.values()):
        raise Refusal(400, "a scope has a ledger, an app, a query and a sink")
    return about


def _scopes(store: ReceiverStore, call: _Call) -> Any:
    return store.scopes()


def _scope(store: ReceiverStore, call: _Call) -> Any:
    found = [scope for scope in store.scopes() if scope["slug"] == call.scope]
    return found[0] if found else {"mark": None}


def _document(store: ReceiverStore, call: _Call) -> Any:
    return document()


HANDLERS: Final[Mapping[str, Handler]] = {
    handle.__name__: handle
    for handle in (
        *(_put_chunk, _drop_task, _prepare, _commit, _abort, _tidy, _look_up),
        *(_pending, _fence, _rename, _scopes, _scope),
    )
}
"""What answers each request of the protocol."""
