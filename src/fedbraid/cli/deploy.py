"""`fedbraid deploy`: from a file to a fleet of real clients."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli.help import App
from fedbraid.cli.show import Json, Quiet, complain, facts, give, table
from fedbraid.errors import ConfigError, EngineError
from fedbraid.parse import literal
from fedbraid.run.formatting import format_bytes, format_percent

if TYPE_CHECKING:
    from fedbraid.run.checkpoint import Record

app = App(help="Run a fleet of real clients: a broker, a server, and nodes.", no_args_is_help=True)
TRY_AGAIN = 75  # the exit code of a server that its supervisor is to start again
URL = re.compile(r"tls://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")


def _url(text: str) -> str:
    found = URL.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(
            f"the broker's address must be tls://HOST:PORT, got {text!r}; e.g. tls://fl.example.org:4222"
        )
    return text


Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment [default: here].")]
InDir = Annotated[Path, typer.Option("--dir", help="Folder of the deployment [default: here].")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "-c", "--config", metavar="KEY=VALUE", help="Override a key of fleet.toml; may be repeated."
    ),
]
Url = Annotated[str, typer.Argument(metavar="URL", callback=_url, help="Broker: tls://HOST:PORT.")]
Unit = Annotated[Path | None, typer.Option(help="Write a systemd unit that does this, instead of doing it.")]
HERE = Path(".")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")],
    task: Annotated[
        str | None, typer.Argument(metavar="FILE.py:TASK", help="A task from your own file, as in `run`.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Argument(metavar="ALGORITHM", help="A name, or FILE.py:NAME of your own.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a deployment: fleet.py says what is learned, fleet.toml how the run goes.

    Given a task of yours, there is nothing to edit: its file is copied, and the nodes learn what the simulator did.

    \b
    Examples:
      fedbraid deploy init fleet && fedbraid deploy trial fleet --nodes 3
      fedbraid deploy init fleet my.py:task my.py:algorithm
    """
    from fedbraid.deploy.project import init as write

    written = write(folder, task=task, algorithm=algorithm)
    if json:
        give({"written": [str(p) for p in written]})
    else:
        said = {
            "edit": written[0],
            "configure": written[1],
            "try": f"fedbraid deploy trial {folder} --nodes 3",
        }
        facts({name: str(value) for name, value in said.items()})


@app.command()
def trial(
    folder: Dir = HERE,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Nodes to start on this machine.")] = 3,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a deployment to its end on this machine: a broker, a server and nodes on loopback; then clean up.

    Each node gets `share` (0 to NODES-1) and `shares` in its configuration, for `load(node_config)`.

    \b
    Examples:
      fedbraid deploy trial fleet --nodes 3
      fedbraid deploy trial fleet -c "algorithm=scaffold()" -c "schedule=rounds(5, clients=2)"
    """
    from fedbraid.deploy.local_fleet import trial as run

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
        shown: dict[str, Any] = {**about, "accuracy": format_percent(about["accuracy"])}
        shown |= {
            "bytes up": format_bytes(shown.pop("bytes_up")),
            "bytes down": format_bytes(shown.pop("bytes_down")),
        }
        facts(shown)


@app.command()
def keys(
    folder: Dir = HERE,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address that nodes reach the broker by; may be repeated [default: localhost]."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, max=100_000, help="Number of nodes that need a key.")] = 0,
    edges: Annotated[int, typer.Option(min=0, max=1000, help="Number of edges that need a key.")] = 0,
    json: Json = False,
) -> None:
    """Make a CA, the server's certificate, the operator's key, and a key for each node, in DIR/keys.

    Existing files are kept, so a larger --nodes adds keys; a broker that runs accepts them at once.

    \b
    Example:
      fedbraid deploy keys fleet --host fl.example.org --nodes 50
    """
    from fedbraid.deploy import credentials, service

    written = credentials.make(folder / "keys", host or ["localhost", "127.0.0.1"], nodes, edges)
    if (folder / "broker" / service.UP).exists() and (broker := service.broker_of(folder)).is_running:
        broker.reload()
    if json:
        give({"written": [str(p) for p in written]})
    else:
        names = [p.name for p in written]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        facts({"written": shown or "nothing: all exist", "in": str(folder / "keys")})


@app.command()
def up(
    folder: Dir = HERE,
    host: Annotated[str, typer.Option(help="Address that the broker listens on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that the broker listens on.")] = 4222,
    set_: Set = None,
    unit: Unit = None,
) -> None:
    """Run the broker and the server until the run has ended; whichever dies is started again.

    Started again with the same `out`, the run resumes from its last committed step.

    \b
    Examples:
      fedbraid deploy up fleet -c "algorithm=scaffold()" -c minimum=2
      fedbraid deploy up /var/lib/fedbraid/fleet --unit fedbraid-server.service
    """
    from fedbraid.deploy.service import up as run
    from fedbraid.deploy.systemd import write

    if unit is None:
        return run(folder, host, port, set_ or [], _settings(set_ or []))
    words = ["deploy", "up", str(folder.resolve()), "--host", host, "--port", str(port)]
    write(unit, "fedbraid server", [*words, *(w for p in set_ or [] for w in ("-c", p))], is_node=False)
    _next(unit)


@app.command(hidden=True)
def serve(folder: Dir, url: Url, set_: Set = None) -> None:
    """Run a server alone; `up` and `trial` do, and start it again."""
    import logging

    from fedbraid.deploy.project import Deployment
    from fedbraid.deploy.serve import serve_folder

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    logging.getLogger("fedbraid").setLevel(logging.INFO)
    deployment = Deployment.read(folder, _settings(set_ or []))
    try:
        serve_folder(deployment, url)
    except EngineError as error:  # the broker's: it may be starting
        complain(str(error))
        raise typer.Exit(TRY_AGAIN) from error


@app.command()
def node(
    url: Url,
    key: Annotated[Path, typer.Option(help="Key of this node, with ca.crt and operator.pub beside it.")],
    task: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="The project in this node's copy of fleet.py.")
    ] = "fleet.py:fleet",
    state: Annotated[Path, typer.Option(help="Folder for this node's state.")] = Path("~/.fedbraid/nodes"),
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--config", metavar="KEY=VALUE", help="What load(node_config) gets; may be repeated."
        ),
    ] = None,
    unit: Unit = None,
) -> None:
    """Run a node: it connects to the broker and trains on its own data as signed orders say.

    \b
    Examples:
      fedbraid deploy node --key node-7.nk tls://fl.example.org:4222
      fedbraid deploy node --key /etc/fedbraid/node-7.nk --task /etc/fedbraid/fleet.py:fleet --unit node.service tls://fl.example.org:4222
    """
    from fedbraid.deploy.node import run_node
    from fedbraid.deploy.project import load
    from fedbraid.deploy.systemd import write
    from fedbraid.user_files import absolute

    project = load(task)
    if unit is None:
        return run_node(project, url, key, state, _settings(set_ or []))
    words = ["deploy", "node", "--key", str(key.resolve()), "--task", absolute(task)]
    words += ["--state", "/var/lib/fedbraid/nodes", *(w for pair in set_ or [] for w in ("-c", pair)), url]
    write(unit, f"fedbraid node {key.stem}", words, is_node=True)
    _next(unit)


@app.command()
def edge(
    url: Url,
    key: Annotated[Path, typer.Option(help="Key of this edge, with ca.crt and operator.pub beside it.")],
    task: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="The project in this edge's copy of fleet.py.")
    ] = "fleet.py:fleet",
    unit: Unit = None,
) -> None:
    """Run an edge: it folds the uploads of the nodes that `edges` in fleet.toml gives it, and hands over one sum.

    An edge sees single uploads, so it is trusted as the server is.

    \b
    Example:
      fedbraid deploy edge --key edge-0.nk --task fleet.py:fleet tls://fl.example.org:4222
    """
    from fedbraid.deploy.edge import EdgeRuntime
    from fedbraid.deploy.node import run_node
    from fedbraid.deploy.project import load
    from fedbraid.deploy.systemd import write
    from fedbraid.user_files import absolute

    project = load(task)
    if unit is None:
        return run_node(project, url, key, Path("~/.fedbraid/edges"), {}, EdgeRuntime)
    words = ["deploy", "edge", "--key", str(key.resolve()), "--task", absolute(task), url]
    write(unit, f"fedbraid edge {key.stem}", words, is_node=True)
    _next(unit)


def _next(unit: Path) -> None:
    install = f"useradd -r fedbraid; cp {unit} /etc/systemd/system/; systemctl enable --now {unit.name}"
    facts({"written": str(unit), "install": install})


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, such as node-7.")],
    folder: InDir = HERE,
) -> None:
    """Take a node's key away: it is disconnected at once, and what it sent is dropped.

    \b
    Example:
      fedbraid deploy revoke node-7
    """
    from fedbraid.deploy.service import revoke as take

    cut = take(folder, name)
    typer.echo(f"{name} is revoked" + (" and disconnected" if cut else "; no broker runs here"))


@app.command()
def leave(
    name: Annotated[
        str, typer.Argument(metavar="NODE", help="Name of the node, as `deploy status` shows it.")
    ],
    folder: InDir = HERE,
) -> None:
    """Let a client leave the run for good, before the next server step.

    What the server holds of it is removed. Where clients hold state, the node is asked for its contribution; if it does not
    answer within the deadline, the contribution stays, and the step's record says so (unreturned).

    \b
    Example:
      fedbraid deploy leave node-2
    """
    from fedbraid.deploy import departures, service
    from fedbraid.run.checkpoint import Folder

    departures.name(Folder(service.read(folder).out), name)
    typer.echo(f"{name} leaves before the server's next step")


@app.command()
def admit(
    name: Annotated[
        str, typer.Argument(metavar="NODE", help="Name of the node, as `deploy status` shows it.")
    ],
    folder: InDir = HERE,
) -> None:
    """Ask a node again whose uploads were refused too often in a row.

    \b
    Example:
      fedbraid deploy admit node-2
    """
    from fedbraid.deploy import admissions, service
    from fedbraid.run.checkpoint import Folder

    admissions.name(Folder(service.read(folder).out), name)
    typer.echo(f"{name} is asked again from the server's next selection on")


@app.command()
def status(folder: Dir = HERE, json: Json = False) -> None:
    """Show what a fleet is doing: who is connected, what the run waits for, what was refused. Exit code 1 if it is dead.

    \b
    Example:
      fedbraid deploy status fleet
    """
    from fedbraid.deploy.doctor import status as ask

    told = ask(folder)
    run = told["run"]
    if json:
        give(told)
    else:
        _show(told, run)
    if not told["broker"] or run is None or run["life"] in ("dead", "silent", "failed"):
        raise typer.Exit(1)


LIVES = {
    "dead": "DEAD: its process has ended", "silent": "SILENT", "running": "running", "done": "done",
    "failed": "FAILED", "stopped": "stopped",
}  # fmt: skip


def _show(told: dict[str, Any], run: dict[str, Any] | None) -> None:
    broker = f"port {told['port']} " + ("answers" if told["broker"] else "DOES NOT ANSWER")
    if run is None:
        return facts({"broker": broker, "server": "has not said anything yet"})
    lives = run["life"] == "running"
    facts(
        {
            "broker": broker,
            "server": f"{LIVES[run['life']]}, last heard of {run['age']:.0f} s ago",
            "step": f"{run['step']} of {run['steps']}"
            + (f", {run['busy']} nodes are at work" if lives else ""),
            "nodes": f"{run['nodes']} connected" if lives else None,
            "waiting for": run["wait"]["for"] if lives else None,
            "error": run["error"] or None,
        }
    )
    for one in run["fleet"] if lives else ():
        asked = f", asked {one['asked'] + run['age']:.0f} s ago" if one["asked"] is not None else ""
        seen = "" if one["seen"] is None else f", last seen {one['seen'] + run['age']:.0f} s ago"
        why = f": {one['why']}" if one["why"] else ""
        away = "" if one["here"] else ", NOT CONNECTED" + seen
        typer.echo(f"  {one['name']}: {one['state']}{asked}{away}{why}")
    for trouble in run["trouble"]:
        typer.echo(f"  {trouble['node']}: {trouble['why']} ({trouble['times']} times)")


@app.command()
def doctor(
    folder: Dir = HERE,
    key: Annotated[Path | None, typer.Option(help="Examine this node's key instead, with --url.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Broker that the node connects to: tls://HOST:PORT.")
    ] = None,
    json: Json = False,
) -> None:
    """Find what is wrong: task, keys, certificates, open files, the broker and how durable it is, the server.

    \b
    Examples:
      fedbraid deploy doctor fleet
      fedbraid deploy doctor --key node-7.nk --url tls://fl.example.org:4222
    """
    from fedbraid.deploy.doctor import examine, examine_node

    if (key is None) != (url is None):
        raise ConfigError("--key and --url must be given together; leave out both to examine a server")
    found = examine(folder) if key is None or url is None else examine_node(key, _url(url))
    if json:
        give([vars(one) for one in found])
    else:
        head = ["what", "found", "fine", "to do"]
        table("What there is to see from here", head, [one.row() for one in found], left=len(head))
    if not all(one.good for one in found):
        raise typer.Exit(1)


LONG = 30.0  # seconds of waiting that are worth a line


class View:
    """One line a step: nodes, round, accuracy, bytes."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.nodes, self.troubles, self.waits = quiet, -1, 0, ""

    def tell(self, status: Record, records: list[Record]) -> None:
        if self.quiet or not status:
            return
        if status["nodes"] != self.nodes:
            self.nodes = status["nodes"]
            typer.echo(f"{self.nodes} nodes connected", err=True)
        for trouble in status["trouble"][self.troubles :]:
            typer.echo(f"{trouble['node']}: {trouble['why']}", err=True)
        self.troubles = len(status["trouble"])
        wait = status["wait"]
        if wait["for"] != self.waits and status["at"] - wait["since"] > LONG:
            self.waits = wait["for"]
            typer.echo(f"waiting for {self.waits}, for {status['at'] - wait['since']:.0f} s so far", err=True)
        for r in records:
            words = [f"step {r['step']}/{status['steps']}", f"{r['nodes']} nodes", f"clients {r['clients']}"]
            words += [format_percent(r["accuracy"])] if "accuracy" in r else []
            words += [f"up {format_bytes(r['bytes_up'])}", f"down {format_bytes(r['bytes_down'])}"]
            words += [f"refused or lost {len(r['trouble'])}"] if "trouble" in r else []
            typer.echo("  ".join(words), err=True)


def _settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE as the configuration has it: numbers and true or false where they are, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not of the form KEY=VALUE")
        settings[key] = {"true": True, "false": False}.get(value, literal(value))
    return settings
