"""Is the written wire enough for a client in another language?"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "javascript-node"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
]


@pytest.mark.quick
def test_javascript_reads_and_writes_the_same_bytes():
    command = ["node", HERE / "fleet_vectors.mjs", EXAMPLE / "wire.mjs", HERE / "fleet_vectors.json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout == "equal\n", told.stderr


def test_the_client_is_short():
    lines = [line for file in EXAMPLE.glob("*.mjs") for line in file.read_text().splitlines()]
    assert len(lines) < 300
    assert json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
