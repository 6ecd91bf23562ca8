"""A program that needs three starts, for the tests of the kit that kills processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from semel.crashpoints import CrashPoint, reach


def main(arguments: Sequence[str]) -> int:
    """Count the starts in a file; end with 0 at the third one."""
    tries, words = Path(arguments[0]), arguments[1:]
    tries.write_text((tries.read_text() if tries.exists() else "") + "x")
    print("here", *words, flush=True)
    reach(CrashPoint.FLUSH_BEFORE)
    print("further", flush=True)
    if "linger" in words:
        time.sleep(60)
    return 0 if len(tries.read_text()) >= 3 else 7
