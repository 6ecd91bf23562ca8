"""The child's side of `semel.testing.kill.Zygote`: import once, fork for every line."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from semel.crashpoints import hook_from_environment, install

Function = Callable[[Sequence[str]], int]


def main(function: str, *modules: str) -> None:
    """Fork a process for every request on the standard input; say its number."""
    module, _, name = function.partition(":")
    found: Function = getattr(importlib.import_module(module), name)
    for other in modules:
        importlib.import_module(other)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the dead children
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _be(found, *json.loads(line))
        print(pid, flush=True)


def _be(
    function: Function, arguments: list[str], environment: dict[str, str], log: str, result: str
) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    install(hook_from_environment())
    code = 1
    try:
        code = function(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the last thing this process says
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        Path(result).write_text(str(code))
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
