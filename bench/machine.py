"""On what, and beside what else, a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def machine() -> str:
    """Describe the machine in one line."""
    return f"{os.cpu_count()} cores ({_processor()}), {_memory_gb():.0f} GB, {platform.system()}"


def versions() -> str:
    """Name everything that takes part in one line."""
    packages = ["pyspark", "pyarrow", "numpy", "psycopg"]
    named = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {_java()}, {named}, PostgreSQL 18"


def busy_cores(seconds: float = 3.0) -> float:
    """Say how many cores others keep busy, while this process waits."""
    try:
        before = _busy_ticks()
        time.sleep(seconds)
        ticks = _busy_ticks() - before
    except OSError:  # no /proc here
        return os.getloadavg()[0]
    return float(ticks / os.sysconf("SC_CLK_TCK") / seconds)


def cpu_seconds() -> float:
    """Say how much CPU this process and all that it started have used; 0 without /proc."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, *rest = stat.read_text().rpartition(")")[2].split()
            # Its own, and that of its children that have ended.
            parents[stat.parent.name] = parent
            ticks[stat.parent.name] = sum(map(int, rest[9:13]))
    ours, found = {str(os.getpid())}, 0
    while len(ours) > found:
        found = len(ours)
        ours |= {child for child, parent in parents.items() if parent in ours}
    return sum(ticks.get(one, 0) for one in ours) / os.sysconf("SC_CLK_TCK")


def _busy_ticks() -> int:
    user, nice, system, _idle, _iowait, irq, softirq, *_ = (
        int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return user + nice + system + irq + softirq


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _java() -> str:
    done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    words = done.stderr.split('"')
    return f"Java {words[1]}" if len(words) > 1 else "Java"
