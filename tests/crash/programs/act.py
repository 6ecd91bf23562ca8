"""The command line in a process of its own: act ARGUMENT …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.cli.app import app
from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handler import consumer
from semel.messaging.settings import ConsumerSettings


@consumer("billing", policy=ConsumerSettings(versioned=True), id_from=FromHeader("message-id"))
async def billing(message: Message, session: Any) -> None:
    """Stand for the consumer whose versions are passed over."""


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say."""
    try:
        app(list(arguments), prog_name="semel")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
