"""systemd units for the two services that a fleet has: the SuperLink, and a node."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fedbraid.errors import DataError

UNIT = """\
[Unit]
Description={what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
Restart=always
RestartSec=5
KillMode=control-group
TimeoutStopSec=20
User=fedbraid
StateDirectory=fedbraid
StateDirectoryMode=0700
WorkingDirectory=/var/lib/fedbraid
Environment=FLWR_HOME=/var/lib/fedbraid/flower FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
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


def write(path: Path, what: str, words: Sequence[str], devices: bool) -> Path:
    """A unit that runs `fedbraid WORDS` for ever; `devices`: it may use graphics cards."""
    command = " ".join(_quoted(word) for word in [sys.executable, "-m", "fedbraid", *words])
    text = UNIT.format(what=what, command=command, private_devices="no" if devices else "yes")
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
