"""Secrets: where passwords come from, how they are kept out of logs, and files of the owner alone.

an argument, or what a callable returns   ──▶  first
the URL                                   ──▶  then
PGPASSWORD                                ──▶  last
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

Password: TypeAlias = str | Callable[[], str] | None
"""A password, or a function called for each connection; None: the URL's own."""

HIDDEN: Final = "***"

# Settings of Kafka's client have names such as sasl.password and ssl.key.password.
_QUERY = re.compile(r"([?&](?:ssl|[\w.]*\.)?password=)([^&#]*)", re.IGNORECASE)
_KEYWORD = re.compile(r"\b((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&#]+)", re.IGNORECASE)


def create_private(path: str | os.PathLike[str]) -> None:
    """Create an empty file that only its owner may read; leave one that exists as it is."""
    # If it cannot be created, whatever opens it says why.
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def masked(url: str) -> str:
    """Return *url* with its passwords hidden, for logs and reports.

    Takes a URL or a string of ``keyword=value`` pairs.  A password that contains unescaped
    separators is hidden, too.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return _hide(_KEYWORD, url)
    credentials, at, place = _split_credentials(rest)
    user, colon, _ = credentials.partition(":")
    hidden = f"{user}{colon}{HIDDEN if colon else ''}{at}"
    return f"{scheme}://{hidden}{_hide(_QUERY, place)}"


def resolve(url: str, password: Password = None) -> str:
    """Return *url* with the password to connect with; never log or show the result.

    Call it for every connection: a callable may return another password each time.
    """
    scheme, _, rest = url.partition("://")
    credentials, _, place = _split_credentials(rest)
    user, colon, _ = credentials.partition(":")
    given = password() if callable(password) else password
    if given is None:
        if colon or _QUERY.search(place):
            return url
        given = os.environ.get("PGPASSWORD")
    if not given:
        return url
    return f"{scheme}://{user}:{quote(given, safe='')}@{place}"


def scrubbed(text: str, url: str) -> str:
    """Return *text*, such as a driver's error, without the passwords that *url* carries."""
    _, _, rest = url.partition("://")
    credentials, _, place = _split_credentials(rest)
    secrets = [credentials.partition(":")[2], *(found[1] for found in _QUERY.findall(place))]
    for secret in filter(None, secrets):
        text = text.replace(secret, HIDDEN).replace(unquote(secret), HIDDEN)
    return text


def _hide(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda found: f"{found[1]}{HIDDEN}", text)


def _split_credentials(rest: str) -> tuple[str, str, str]:
    """Split what follows ``://`` into credentials, the at sign, and the place."""
    head, question, query = rest.partition("?")
    credentials, at, place = head.rpartition("@")
    if not at and "@" in query and re.fullmatch(r"[^:/]*:[^/]*[^/\d][^/]*", head):
        # An unescaped question mark inside a password would look like the start of the query.
        return rest.rpartition("@")
    return credentials, at, f"{place}{question}{query}"
