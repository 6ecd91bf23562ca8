"""Secrets: where passwords come from, how they are kept out of logs, and files of the owner alone.

an argument, or what a callable returns   ──▶  first
the URL                                   ──▶  then
PGPASSWORD                                ──▶  last
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote, unquote_plus

Password: TypeAlias = str | Callable[[], str] | None
"""A password, or a function called for each connection; None: the URL's own."""

HIDDEN: Final = "***"

# The end of a setting's name, after all but letters was removed: sslpassword,
# sasl.oauthbearer.client.secret, fs.s3a.secret.key, api_key, X-Amz-Signature.
_SECRET_NAMES: Final = (
    *("password", "passwd", "pwd", "passphrase", "secret", "token", "credential", "credentials"),
    *("secretkey", "accesskey", "apikey", "accountkey", "privatekey", "signature", "sig"),
    *("pass", "authorization", "jaasconfig", "keystorekey"),
)
_PAIR: Final = re.compile(r"([?&;#])([^=?&;#]*)=([^&;#]*)")
_KEYWORD: Final = re.compile(r"([\w.%-]+)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&#]+)")
_PORT: Final = re.compile(r":\d*$|\]$")
# A password without the at sign and the host: what follows the colon cannot be a port.
_NO_PORT: Final = re.compile(r"([^/?#,:\[\]]*:)(?!\d*(?:[/?#,]|$))([^/?#]*)")
_LAST_NAME: Final = re.compile(r"(?:^|[&;#])([^=&;#]*)=[^=&;#]*$")


def create_private(path: str | os.PathLike[str]) -> None:
    """Create an empty file that only its owner may read; leave one that exists as it is."""
    # If it cannot be created, whatever opens it says why.
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def masked(url: str) -> str:
    """Return *url* with its passwords hidden, for logs and reports.

    Takes a URL or a string of ``keyword=value`` pairs.  A password that contains unescaped
    separators is hidden, too; of a text that is neither, everything before its last at sign.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        shown = _KEYWORD.sub(lambda pair: _shown(pair[1], f"{pair[1]}{pair[2]}", pair[3]), url)
        before, at, place = shown.rpartition("@")
        return f"{HIDDEN}{at}{place}" if at and "=" not in before else shown
    credentials, at, place = _split_to_hide(rest)
    user, colon, _ = credentials.partition(":")
    if _is_token(scheme, credentials):
        user, colon = "", ""
        at = f"{HIDDEN}{at}"
    hidden = f"{user}{colon}{HIDDEN if colon else ''}{at}"
    if not at and (port := _NO_PORT.match(place)):
        place = f"{port[1]}{HIDDEN}{place[port.end() :]}"
    place = _PAIR.sub(lambda pair: _shown(pair[2], f"{pair[1]}{pair[2]}=", pair[3]), place)
    return f"{scheme}://{hidden}{place}"


def resolve(url: str, password: Password = None) -> str:
    """Return *url* with the password to connect with; never log or show the result.

    Call it for every connection: a callable may return another password each time.
    """
    scheme, _, rest = url.partition("://")
    credentials, _, place = _split_credentials(rest)
    user, colon, _ = credentials.partition(":")
    given = password() if callable(password) else password
    if given is None:
        if colon or any(_is_password(pair[2]) for pair in _PAIR.finditer(place)):
            return url
        given = os.environ.get("PGPASSWORD")
    if not given:
        return url
    return f"{scheme}://{user}:{quote(given, safe='')}@{place}"


def is_ambiguous(url: str) -> bool:
    """Return whether a driver would take a part of the password for the host or the port.

    It would then show that part in its errors.
    """
    _, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    has_no_port = "@" not in authority and _NO_PORT.match(authority) is not None
    return has_no_port or "@" in _split_credentials(rest)[0]


def scrubbed(text: str, url: str) -> str:
    """Return *text*, such as a driver's error, without the passwords that *url* carries."""
    # The longest first: one may contain another.
    for secret in sorted(_secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def scrubbed_values(found: Any, scrub: Callable[[str], str]) -> Any:
    """Return a JSON document with *scrub* applied to its texts; its structure and keys stay.

    A password may be a quotation mark, or a word of the document's own.
    """
    if isinstance(found, str):
        return scrub(found)
    if isinstance(found, Mapping):
        return {key: scrubbed_values(value, scrub) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [scrubbed_values(value, scrub) for value in found]
    return found


def _secrets_of(url: str) -> set[str]:
    """Return the secrets of a URL, in every spelling in which they may be quoted."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        pairs = [(pair[1], pair[3].strip("'")) for pair in _KEYWORD.finditer(url)]
        secrets = [value for name, value in pairs if _is_secret(name)]
        before, at, _ = url.rpartition("@")
        secrets += [before.rpartition(":")[2]] if at and "=" not in before else []
    else:
        secrets = [pair[3] for pair in _PAIR.finditer(rest) if _is_secret(pair[2])]
        for split in (_split_credentials, _split_to_hide):
            credentials = split(rest)[0]
            secrets.append(credentials.partition(":")[2])
            secrets += [credentials] if _is_token(scheme, credentials) else []
        secrets += [port[2]] if "@" not in rest and (port := _NO_PORT.match(rest)) else []
    plain = {unquote(secret) for secret in secrets} | {unquote_plus(secret) for secret in secrets}
    return {*secrets, *plain, *(quote(secret, safe="") for secret in plain)} - {""}


def _is_token(scheme: str, credentials: str) -> bool:
    """Return whether what comes before the at sign is itself the secret, as some services have it.

    A database's URL has a role's name there.
    """
    return scheme.lower().startswith("http") and re.fullmatch(r"[^:/]+", credentials) is not None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", unquote(name).lower())


def _is_secret(name: str) -> bool:
    """Return whether a setting's value must not be shown, in any spelling of its name."""
    return _letters(name).endswith(_SECRET_NAMES)


def _is_password(name: str) -> bool:
    return _letters(name).endswith("password")


def _shown(name: str, before: str, value: str) -> str:
    return f"{before}{HIDDEN if _is_secret(name) else value}"


def _is_host(authority: str, head: str, query: str) -> bool:
    """Return whether an authority without credentials ends with a port, and not with a password.

    ``u:12?3@h`` may be either; where no pair of the query holds the at sign, it is a password.
    """
    return bool(_PORT.search(authority)) and ("/" in head or "=" in query.partition("@")[0])


def _split_to_hide(rest: str) -> tuple[str, str, str]:
    """Split as `_split_credentials` does, but take for a password what may be one.

    ``u:12/x?y=z@h/db`` has a host ``u`` or a password with separators; an at sign is expected
    only in a user's name, in a query.
    """
    before, at, place = rest.rpartition("@")
    head, question, query = before.partition("?")
    name = _LAST_NAME.search(query)
    is_name = name is not None and _letters(name[1]).endswith(("user", "name", "email"))
    if question and ":" in head.partition("/")[0] and not is_name:
        return before, at, place
    return _split_credentials(rest)


def _split_credentials(rest: str) -> tuple[str, str, str]:
    """Split what follows ``://`` into credentials, the at sign, and the place."""
    head, question, query = rest.partition("?")
    credentials, at, place = head.rpartition("@")
    authority = head.partition("/")[0]
    if not at and "@" in query and ":" in authority and not _is_host(authority, head, query):
        # An unescaped question mark inside a password would look like the start of the query.
        return rest.rpartition("@")
    return credentials, at, f"{place}{question}{query}"
