"""`fedbraid watch`: a run's report on localhost while it goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from fedbraid.cli.report import Goal, Runs
from fedbraid.cli.show import Quiet


def watch(
    runs: Runs,
    port: Annotated[int, typer.Option(help="Port; 0 takes any free port")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address; 0.0.0.0 shows the page to every host that can reach this machine")
    ] = "127.0.0.1",
    target: Goal = None,
    quiet: Quiet = False,
) -> None:
    """Show a run's report on localhost, updating while the run goes on. It reads only; Ctrl-C ends it.

    \b
    Examples:
      fedbraid watch runs/digits-fedavg-1
      fedbraid watch runs/digits-compare-1 --port 9000
    """
    from fedbraid.report.watch import serve

    server = serve(runs, host, port, target)
    if not quiet:
        print(f"watching on {server.address} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
