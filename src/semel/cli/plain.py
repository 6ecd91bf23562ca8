"""Safe text for a terminal: ids, keys and reasons that other people chose, with escapes.

A producer may put an escape sequence into a key; listing dead letters must not run it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Control characters but for the ends of lines and tabs, what turns the direction of writing
# around, and halves of characters, which no terminal's encoding knows.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

AS_JSON: Final = "json:"

SHOWN_CHARACTERS: Final = 72
"""How much of an id or a key a table shows: a UUID or a SHA-256 with its prefix is whole."""


def plain(text: str) -> str:
    """Return *text* with escapes for what is not seen, or acts on a terminal."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str) -> str:
    """Return *text* for a table, without its middle where it is long: ids differ at both ends."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}…{text[1 - half :]}"


def given(text: str) -> str:
    r"""Read an id or a key as it was typed; ``json:"a\u0000b"`` says what a shell cannot.

    Raises:
        typer.BadParameter: there is no JSON text behind ``json:``.
    """
    if not text.startswith(f'{AS_JSON}"'):
        return text
    try:
        found = json.loads(text.removeprefix(AS_JSON))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a text in JSON: {error}") from error
    return str(found)


class PlainConsole(Console):
    """A console that never reads text as markup, and escapes what acts on a terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text for the screen."""
        return super().render_str(self._shown(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Take the pieces of what is shown."""
        if isinstance(renderable, Text) and self._shown(renderable.plain) != renderable.plain:
            renderable = self._plain_text(renderable)
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else self._shown(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def _plain_text(self, text: Text) -> Text:
        """Return the same text; colours in the middle of it are lost."""
        return Text(
            self._shown(text.plain),
            style=text.style,
            justify=text.justify,
            overflow=text.overflow,
            no_wrap=text.no_wrap,
            end=text.end,
        )

    def _shown(self, text: str) -> str:
        if text.isascii() and text.isprintable():
            return text
        return plain(text).encode(self.encoding, "backslashreplace").decode(self.encoding)
