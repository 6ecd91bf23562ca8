"""Which file system a path is on, as far as the kernel tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

NETWORK: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "glusterfs", "gpfs",
        "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf",
    }
)  # fmt: skip

NETWORK_FUSE: Final = frozenset(
    {
        "ceph", "davfs", "davfs2", "gcsfuse", "glusterfs", "goofys", "hdfs", "juicefs",
        "mount-s3", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs",
    }
)  # fmt: skip
"""What stands behind ``fuse.``: FUSE itself is no network."""

_MOUNTS: Final = Path("/proc/self/mounts")


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that *path* is on; None if it is on none we know.

    *mounts* is what the kernel lists; where it lists nothing, nothing is known.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return None
    kind = _type_of(path.resolve(), mounts)
    is_network = kind in NETWORK or kind.removeprefix("fuse.") in NETWORK_FUSE
    return kind if is_network else None


def _type_of(path: Path, mounts: str) -> str:
    """The type of the last and deepest mount above *path*; the last one hides those before it."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[1]))
        depth = len(point.parts)
        if depth >= best and path.is_relative_to(point):
            best, kind = depth, fields[2]
    return kind
