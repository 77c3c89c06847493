"""`fedbraid deploy`: from a file to a fleet of real clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli.show import Json, Quiet, facts, give
from fedbraid.errors import ConfigError
from fedbraid.run.metrics import format_bytes, format_share

if TYPE_CHECKING:
    from fedbraid.run.checkpoint import Record

app = typer.Typer(
    help="Real clients on Flower: init, trial, keys.", no_args_is_help=True, rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The deployment's folder.")]


@app.command()
def init(folder: Folder, json: Json = False) -> None:
    """Write a deployment: fleet.py, the one file to edit, and pyproject.toml, which makes it a Flower app.

    \b
    Example:
      fedbraid deploy init fleet && fedbraid deploy trial fleet --nodes 3
    """
    from fedbraid.deploy.project import init as write

    written = write(folder)
    if json:
        give({"written": [str(p) for p in written]})
    else:
        facts(
            {
                "edit": str(written[0]),
                "configure": str(written[1]),
                "try": f"fedbraid deploy trial {folder} --nodes 3",
            }
        )


@app.command()
def trial(
    folder: Folder,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="SuperNodes to start on this machine.")] = 3,
    set_: Annotated[
        list[str] | None,
        typer.Option("-c", "--config", metavar="KEY=VALUE", help="Override a key of [tool.flwr.app.config]."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a deployment to its end on this machine: a SuperLink and SuperNodes on loopback, then clean up.

    \b
    Each node gets `share` (0 to NODES-1) and `shares` in its configuration, for `load(node_config)`.

    \b
    Examples:
      fedbraid deploy trial fleet --nodes 3
      fedbraid deploy trial fleet -c "algorithm=scaffold()" -c "schedule=rounds(5, clients=2)"
    """
    from fedbraid.deploy.trial import trial as run

    view = View(quiet or json)
    done = run(folder, nodes, _settings(set_ or []), view.tell)
    records = list(done.records())
    about = {
        "run": str(done.path), "steps": len(records), "nodes": nodes,
        "accuracy": next((r["accuracy"] for r in reversed(records) if "accuracy" in r), None),
        "bytes_up": sum(r["bytes_up"] for r in records), "bytes_down": sum(r["bytes_down"] for r in records),
        "trouble": sum(len(r.get("trouble", [])) for r in records),
    }  # fmt: skip
    if json:
        give(about)
    elif not quiet:
        shown: dict[str, Any] = {**about, "accuracy": format_share(about["accuracy"])}
        shown |= {
            "bytes up": format_bytes(shown.pop("bytes_up")),
            "bytes down": format_bytes(shown.pop("bytes_down")),
        }
        facts(shown)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that nodes reach the server by; may be given again."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, max=100_000, help="How many nodes need a key.")] = 0,
    json: Json = False,
) -> None:
    """Make a CA, the server's certificate and the nodes' keys; what is there already is kept.

    \b
    Example:
      fedbraid deploy keys secrets --host fl.example.org --nodes 3
    """
    from fedbraid.deploy.keys import make

    written = make(folder, host or ["localhost", "127.0.0.1"], nodes)
    if json:
        give({"written": [str(p) for p in written]})
    else:
        facts({"written": ", ".join(p.name for p in written) or "nothing: all are there", "in": str(folder)})


class View:
    """One line a step: nodes, round, accuracy, bytes."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.nodes, self.troubles = quiet, -1, 0

    def tell(self, status: Record, records: list[Record]) -> None:
        if self.quiet or not status:
            return
        if status["nodes"] != self.nodes:
            self.nodes = status["nodes"]
            typer.echo(f"{self.nodes} nodes connected", err=True)
        for trouble in status["trouble"][self.troubles :]:
            typer.echo(f"node {trouble['node']}: {trouble['why']}", err=True)
        self.troubles = len(status["trouble"])
        for r in records:
            words = [f"step {r['step']}/{status['steps']}", f"{r['nodes']} nodes", f"clients {r['clients']}"]
            words += [format_share(r["accuracy"])] if "accuracy" in r else []
            words += [f"up {format_bytes(r['bytes_up'])}", f"down {format_bytes(r['bytes_down'])}"]
            words += [f"refused or lost {len(r['trouble'])}"] if "trouble" in r else []
            typer.echo("  ".join(words), err=True)


def _settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE as the configuration has it: numbers where they are numbers, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not of the form KEY=VALUE")
        settings[key] = _number(value)
    return settings


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
