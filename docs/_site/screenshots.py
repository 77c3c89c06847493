"""Make the gallery's pictures from real runs: a comparison in a terminal, its report, a clock's timeline, a live page.

make pictures     needs Chromium; takes a minute or two, most of it training
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent.parent / "images"
FEDBRAID = [sys.executable, "-m", "fedbraid"]
SHARED = [
    *("--clients", "100", "--partition", "label_chunks(1)", "--per-round", "5", "--rounds", "60"),
    *("--lr", "0.1", "--batch", "10", "--momentum", "0"),
]
CONTESTANTS = ["fedavg", "fedprox(mu=0.1)", "scaffold", "adabest", "fedadavr(optimizer='adam', lr=0.01)"]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, browser() as chromium:
        os.chdir(place)
        words = ["compare", "digits", *CONTESTANTS, *SHARED, "--target", "0.9", "--seeds", "3"]
        subprocess.run([*FEDBRAID, *words, "--out", "five", "--quiet"], check=True)
        terminal(chromium, [*FEDBRAID, *words, "--out", "live", "--jobs", "2"], seconds=12)
        report(chromium, Path("five"))
        timeline(chromium)
        watch(chromium)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        found = p.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


def terminal(chromium: Any, command: list[str], seconds: float) -> None:
    """The live table after some seconds, then Ctrl-C."""
    screen, inner = pty.openpty()
    wide = {**os.environ, "COLUMNS": "86", "LINES": "24", "TERM": "xterm-256color"}
    running = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=wide, start_new_session=True
    )
    os.close(inner)
    text, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([screen], [], [], 0.2)[0]:
            text += os.read(screen, 65536)
    running.send_signal(2)
    with io.BytesIO() as rest:
        while running.poll() is None and select.select([screen], [], [], 20)[0]:
            try:
                rest.write(os.read(screen, 65536))
            except OSError:
                break
    running.wait()
    drawn = re.split(r"(?:\x1b\[2K|\x1b\[1A|\r)+", text.decode(errors="replace").replace("\r\n", "\n"))
    table = [d for d in drawn if "seeds done" in d][-2]  # the last may be cut
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", table).rstrip()
    page = chromium.new_page(viewport={"width": 720, "height": 300}, device_scale_factor=1.5)
    style = (
        "margin:0;padding:16px 20px;background:#1e1e2e;color:#dde;font:14px/1.35 'DejaVu Sans Mono',monospace"
    )
    page.set_content(
        f'<pre id=t style="{style};display:inline-block">$ fedbraid compare digits …\n{html.escape(plain)}</pre>'
    )
    page.locator("#t").screenshot(path=IMAGES / "compare.png")
    page.close()


def report(chromium: Any, folder: Path) -> None:
    out = Path("report.html").absolute()
    subprocess.run([*FEDBRAID, "report", str(folder), "--out", str(out), "--quiet"], check=True)
    for name, scheme, width, height in (
        ("light", "light", 1000, 900),
        ("dark", "dark", 1000, 900),
        ("phone", "light", 390, 844),
    ):
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(out.as_uri())
        page.wait_for_selector("#main-plot canvas")
        page.screenshot(path=IMAGES / f"report-{name}.png")
        page.close()


def timeline(chromium: Any) -> None:
    """Cards of an asynchronous run's report: who trained when, and who holds what."""
    clock = ["--buffer", "5", "--concurrency", "20", "--durations", "lognormal(0, 1)", "--clients", "60"]
    run = ["run", "digits", "fedbuff", "--partition", "dirichlet(0.3)", "--rounds", "50", *clock]
    subprocess.run([*FEDBRAID, *run, "--out", "async", "--quiet"], check=True)
    out = Path("async.html").absolute()
    subprocess.run([*FEDBRAID, "report", "async", "--out", str(out), "--quiet"], check=True)
    page = chromium.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
    page.goto(out.as_uri())
    page.wait_for_selector("#timeline-plot canvas")
    page.locator("#timeline").screenshot(path=IMAGES / "timeline.png")
    page.locator(".card:has(#partition)").screenshot(path=IMAGES / "partition.png")
    page.close()


def watch(chromium: Any) -> None:
    many = [*SHARED, "--epochs", "5", "--rounds", "5000"]
    run = subprocess.Popen([*FEDBRAID, "run", "digits", "adabest", *many, "--out", "going", "--quiet"])
    while not (
        Path("going/metrics.jsonl").exists() and len(Path("going/metrics.jsonl").read_bytes()) > 20000
    ):
        time.sleep(0.2)
    server = subprocess.Popen([*FEDBRAID, "watch", "going", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+", server.stdout.readline())
    assert address is not None
    page = chromium.new_page(viewport={"width": 1000, "height": 640}, color_scheme="light")
    page.goto(address[0])
    page.wait_for_selector("#main-plot canvas")
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / "watch.png")
    page.close()
    for process in (server, run):
        process.send_signal(2)
        process.wait()


if __name__ == "__main__":
    main()
