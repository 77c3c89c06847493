"""systemd units for the two services that a fleet has: the server with its broker, and a node."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fedbraid.errors import DataError

FILES = 1_048_576  # open files: a connection each

UNIT = """\
[Unit]
Description={what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
Restart={restart}
RestartSec=5
KillMode=control-group
TimeoutStopSec=20
User=fedbraid
StateDirectory=fedbraid
StateDirectoryMode=0700
WorkingDirectory=/var/lib/fedbraid
LimitNOFILE={files}
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices={private_devices}
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""


def write(path: Path, what: str, words: Sequence[str], *, is_node: bool) -> Path:
    """A unit that runs `fedbraid WORDS`: a node for ever, with graphics cards; a server until its run has ended."""
    command = " ".join(_quoted(word) for word in [sys.executable, "-m", "fedbraid", *words])
    text = UNIT.format(
        what=what, command=command, private_devices="no" if is_node else "yes",
        restart="always" if is_node else "on-failure", files=FILES,
    )  # fmt: skip
    try:
        path.write_text(text)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _quoted(word: str) -> str:
    """As systemd reads words: `%` and `$` are its own, and so are backslashes."""
    if re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", word):
        return word
    for special in ("\\", '"', "%", "$"):
        word = word.replace(special, ("\\" if special in '\\"' else special) + special)
    return f'"{word}"'
