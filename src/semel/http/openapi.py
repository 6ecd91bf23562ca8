"""The protocol of receivers as an OpenAPI document, and the table that routes are made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from semel.http.client import EPOCH, KEY, meaning


class ProtocolCall(NamedTuple):
    """One request of the protocol."""

    method: str
    path: str
    handler: str
    """The name of the function that answers it here."""

    summary: str
    body: str = ""
    """The schema of its JSON; ``rows`` for a chunk."""

    answer: str = ""
    refusals: tuple[int, ...] = ()


CALLS: Final = (
    ProtocolCall(
        *("PUT", "/chunks/{txn}/{task}/{number}", "_put_chunk"),
        "Store rows of one task attempt, out of sight; the same again changes nothing",
        *("rows", "", (400, 409, 413, 415)),
    ),
    ProtocolCall(
        *("DELETE", "/chunks/{txn}/{task}", "_drop_task"),
        "Forget the chunks of a task, unless its transaction is prepared",
    ),
    ProtocolCall(
        *("POST", "/prepare/{txn}", "_prepare"),
        "Promise to commit exactly these chunks; an older epoch is refused, and so are bad rows",
        *("Promise", "", (400, 409, 410, 422)),
    ),
    ProtocolCall(
        *("POST", "/commit/{txn}", "_commit"),
        "Make the rows visible, all at once; of a cycle only one attempt",
        *("Commit", "", (400, 409, 410)),
    ),
    ProtocolCall(
        *("POST", "/abort/{txn}", "_abort"),
        "Forget everything of an attempt that is not committed",
        refusals=(409,),
    ),
    ProtocolCall(
        *("POST", "/tidy/{txn}", "_tidy"),
        "Forget what losing tasks left of a committed attempt",
    ),
    ProtocolCall(
        *("GET", "/txn/{txn}", "_look_up"),
        "Tell what is known of an attempt",
        answer="Finding",
    ),
    ProtocolCall(
        *("GET", "/pending/{scope}", "_pending"),
        "List the attempts of a scope of which something is stored that no commit has used",
        answer="Pending",
    ),
    ProtocolCall(
        *("POST", "/fence/{scope}", "_fence"),
        "Refuse older epochs of a scope from now on",
        *("Fence", "", (400, 409)),
    ),
    ProtocolCall(
        *("POST", "/rename/{scope}", "_rename"),
        "Give the mark and the epoch of a scope to another one; an older epoch is refused",
        *("Rename", "", (400, 409)),
    ),
    ProtocolCall("GET", "/scopes", "_scopes", "List the scopes with their marks", answer="Scopes"),
    ProtocolCall("GET", "/scopes/{scope}", "_scope", "Tell the mark of a scope", answer="Scope"),
)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


_TEXT: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer"}
_MARK: Final = {"type": ["string", "null"], "description": "the highest committed transaction"}
_ABOUT: Final = {"ledger": _TEXT, "app": _TEXT, "query": _TEXT, "sink": _TEXT}
_TOKEN: Final = {"type": "object", "description": "kept as it is, and compared in every field"}
_CHUNK: Final = {
    "description": "the task, the chunk's number, the SHA-256 of its bytes as sent, its rows",
    "type": "array",
    "prefixItems": [_TEXT, _WHOLE, _TEXT, _WHOLE],
    "minItems": 4,
    "maxItems": 4,
}

SCHEMAS: Final[Mapping[str, Any]] = {
    "Promise": _object(token=_TOKEN, chunks=_list(_CHUNK)),
    "Commit": _object(token=_TOKEN),
    "Finding": _object(state={"enum": ["held", "visible", "gone"]}, evidence=_TEXT),
    "Pending": _list(_object(txn=_TEXT, state={"enum": ["held", "staged", "finished"]})),
    "Fence": _object(epoch=_WHOLE, **_ABOUT),
    "Rename": _object(to=_TEXT, **_ABOUT),
    "Scope": _object(mark=_MARK),
    "Scopes": _list(_object(slug=_TEXT, epoch=_WHOLE, mark=_MARK, **_ABOUT)),
    "Refusal": _object(reason=_TEXT),
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, Any] = {}
    for call in CALLS:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    title = "A receiver that takes part in one decision with other sinks"
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _operation(call: ProtocolCall) -> dict[str, Any]:
    headers = [
        _parameter("header", EPOCH, _WHOLE, "the epoch of the scope's owner"),
    ]
    if call.method != "GET":
        words = "equal for the repetitions of a request by one caller, and for no other request"
        headers.append(_parameter("header", KEY, _TEXT, words))
    named = [_parameter("path", n, _TEXT, "") for n in re.findall(r"{(\w+)}", call.path)]
    answer = _json(call.answer) if call.answer else {}
    responses = {"200": {"description": meaning(200)[1], **answer}}
    for status in (*call.refusals, 425, 429, 503):
        responses[str(status)] = {"description": meaning(status)[1], **_json("Refusal")}
    found: dict[str, Any] = {
        "operationId": call.handler.removeprefix("_"),
        "summary": call.summary,
        "parameters": [*named, *headers],
        "responses": responses,
    }
    if call.body == "rows":
        found["requestBody"] = {"content": {"application/jsonl": {"schema": _TEXT}}}
        encodings = {"enum": ["gzip", "none"]}
        found["parameters"].append(_parameter("header", "Content-Encoding", encodings, ""))
    elif call.body:
        found["requestBody"] = {"required": True, **_json(call.body)}
    return found


def _parameter(place: str, name: str, schema: Any, words: str) -> dict[str, Any]:
    said = {"description": words} if words else {}
    return {"in": place, "name": name, "required": place == "path", "schema": schema, **said}


def _json(schema: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"content": {"application/json": {"schema": reference}}}
