"""`fedbraid deploy`: from a file to a fleet of real clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli.help import App
from fedbraid.cli.show import Json, Quiet, facts, give, table
from fedbraid.errors import ConfigError
from fedbraid.parse import literal
from fedbraid.run.formatting import format_bytes, format_share

if TYPE_CHECKING:
    from fedbraid.run.checkpoint import Record

app = App(help="Real clients on Flower: from a file to a fleet.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The deployment's folder.")]
Keys = Annotated[Path, typer.Argument(metavar="KEYS", help="The folder that `deploy keys` made.")]
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?):([0-9]{1,5})")


def _place(text: str) -> str:
    found = _PLACE.fullmatch(text)
    if found is None or len(found[1]) > 253 or not 0 < int(found[3]) < 65536:
        raise ConfigError(f"{text!r} is no HOST:PORT; write it like fl.example.org:8000")
    return text


Control = Annotated[str, typer.Option(callback=_place, help="Where the SuperLink listens for the operator.")]
Set = Annotated[
    list[str] | None,
    typer.Option("-c", "--config", metavar="KEY=VALUE", help="Override a key of [tool.flwr.app.config]."),
]
Nodes = Annotated[str, typer.Option(callback=_place, help="Where nodes reach the SuperLink.")]
Unit = Annotated[Path | None, typer.Option(help="Write a systemd unit that does this, instead of doing it.")]
CONTROL, NODES = "127.0.0.1:8001", "127.0.0.1:8000"


@app.command()
def init(
    folder: Folder,
    task: Annotated[
        str | None, typer.Argument(metavar="FILE.py:TASK", help="A task of your own, as `run` takes it.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Argument(metavar="ALGORITHM", help="A name, or FILE.py:NAME of your own.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a deployment: fleet.py, the one file to edit, and pyproject.toml, which makes it a Flower app.

    Given a task of yours, there is nothing to edit: its file comes along, and the nodes learn what the simulator did.

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
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a deployment to its end on this machine: a SuperLink and SuperNodes on loopback, then clean up.

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
    """Make a CA, the server's certificate, the nodes' keys, the operator's token and the key that signs apps.

    What is there already is kept.

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


@app.command()
def link(
    keys: Keys,
    listen: Annotated[str, typer.Option(help="Where nodes come in.")] = "0.0.0.0:8000",
    control: Control = CONTROL,
    database: Annotated[Path, typer.Option(help="What the SuperLink remembers.")] = Path("superlink.db"),
    unit: Unit = None,
) -> None:
    """Run the SuperLink: nodes on one port, and nothing but nodes; the operator on another, on loopback alone.

    \b
    Examples:
      fedbraid deploy link secrets --listen 0.0.0.0:8000
      fedbraid deploy link /etc/fedbraid --unit fedbraid-link.service
    """
    from fedbraid.deploy.link import parse_address, serve
    from fedbraid.deploy.unit import write

    addresses = parse_address(listen), parse_address(control)
    if unit is None:
        return serve(keys, *addresses, database)
    words = ["deploy", "link", str(keys.resolve()), "--listen", listen, "--control", control]
    write(unit, "fedbraid SuperLink", [*words, "--database", str(database)], devices=False)
    _next(unit)


@app.command()
def node(
    key: Annotated[
        Path, typer.Argument(metavar="NODE.key", help="Its key, with ca.crt and trusted.yaml beside it.")
    ],
    superlink: Annotated[
        str, typer.Option(callback=_place, help="Where nodes reach the SuperLink, HOST:PORT.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Who this node is; its key file's name by default.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Where it remembers.")] = Path("~/.fedbraid/nodes"),
    set_: Annotated[
        list[str] | None,
        typer.Option("-c", "--config", metavar="KEY=VALUE", help="What load(node_config) gets."),
    ] = None,
    unit: Unit = None,
) -> None:
    """Run a node and keep it running: whatever dies is started again, and nothing is left behind.

    \b
    Examples:
      fedbraid deploy node secrets/node-0.key --superlink fl.example.org:8000 --name clinic-0
      fedbraid deploy node /etc/fedbraid/node-0.key --superlink fl.example.org:8000 --unit fedbraid-node.service
    """
    from fedbraid.deploy.service import Service
    from fedbraid.deploy.unit import write

    called = name or key.stem
    if unit is None:
        config = {**_settings(set_ or []), "name": called, "state": str(state.expanduser().resolve())}
        return Service(key.resolve(), superlink, config).run()
    words = ["deploy", "node", str(key.resolve()), "--superlink", superlink, "--name", called]
    words += ["--state", "/var/lib/fedbraid/nodes", *(w for pair in set_ or [] for w in ("-c", pair))]
    write(unit, f"fedbraid node {called}", words, devices=True)
    _next(unit)


def _next(unit: Path) -> None:
    facts(
        {
            "written": str(unit),
            "install": f"useradd -r fedbraid; cp {unit} /etc/systemd/system/; systemctl enable --now {unit.name}",
        }
    )


@app.command()
def register(
    keys: Keys,
    public: Annotated[list[Path], typer.Argument(metavar="NODE.pub", help="Public keys of nodes.")],
    control: Control = CONTROL,
    remove: Annotated[bool, typer.Option("--remove", help="Shut these nodes out instead.")] = False,
    json: Json = False,
) -> None:
    """Let nodes in by their public keys, or shut them out.

    \b
    Example:
      fedbraid deploy register secrets secrets/node-*.pub
    """
    from fedbraid.deploy.operator import Operator

    done: dict[str, Any] = {}
    with Operator(keys, control) as operator:
        for path in public:
            if remove:
                operator.unregister(path)
            done[str(path)] = None if remove else str(operator.register(path))
    if json:
        give(done)
    else:
        facts({name: "removed" if remove else f"node {node}" for name, node in done.items()})


@app.command()
def run(
    folder: Folder,
    keys: Keys,
    set_: Set = None,
    control: Control = CONTROL,
    json: Json = False,
) -> None:
    """Sign a deployment and start it; started again with the same `out`, it goes on from its last step.

    \b
    Example:
      fedbraid deploy run fleet secrets -c "algorithm=scaffold()" -c minimum=2
    """
    from fedbraid.deploy.operator import Operator
    from fedbraid.deploy.trial import checked

    given = _settings(set_ or [])
    checked(folder, given)
    with Operator(keys, control) as operator:
        started = operator.start(folder, given)
    if json:
        give({"run": str(started)})
    else:
        facts({"run": str(started), "look": f"fedbraid deploy status {keys}"})


@app.command()
def check(keys: Keys, control: Control = CONTROL, nodes: Nodes = NODES, json: Json = False) -> None:
    """What a SuperLink lets whom do: tried out from here, with the token, without it, and as a node.

    \b
    Example:
      fedbraid deploy check secrets --nodes fl.example.org:8000
    """
    from fedbraid.deploy.check import look

    found = look(keys, nodes, control)
    if json:
        give([vars(one) for one in found])
    else:
        head = ["API", "where", "who may", "tried", "found", "as it should be"]
        table("What this SuperLink lets whom do", head, [one.row() for one in found], left=len(head))
    if not all(one.good for one in found):
        raise typer.Exit(1)


@app.command()
def leave(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, where the server runs.")],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The node's name, as `deploy status` shows it.")
    ],
) -> None:
    """Let a client leave a run for good: what the server remembers of it goes before the next step.

    Where clients hold their own memory, the node is asked for the negative of its share; if it does not answer
    within the run's deadline, the share stays, and the step's record says so (left_share).

    \b
    Example:
      fedbraid deploy leave runs/fleet clinic-2
    """
    from fedbraid.deploy import leaving
    from fedbraid.run.checkpoint import Folder

    leaving.name(Folder(folder), name)
    typer.echo(f"{name} will have left when the server takes its next step")


@app.command()
def status(
    keys: Keys,
    control: Control = CONTROL,
    run: Annotated[int | None, typer.Option(help="A run's number; the newest by default.")] = None,
    json: Json = False,
) -> None:
    """What a fleet is doing: who is connected, what the run waits for, who was asked when and has not answered.

    \b
    Example:
      fedbraid deploy status secrets
    """
    from fedbraid.deploy.doctor import status as ask

    told = ask(keys, control, run)
    if json:
        return give(told)
    about, inside = told["run"], told["folder"]
    facts(
        {
            "nodes": f"{sum(n['status'] == 'online' for n in told['nodes'])} of {len(told['nodes'])} connected",
            "run": about and f"{about['run']}, {about['status']} {about['how']}".strip(),
            "step": inside and f"{inside['step']} of {inside['steps']}, {inside['busy']} nodes are at work",
            "waiting for": (inside and inside["state"] == "running" and inside["wait"]["for"]) or None,
        }
    )
    for one in inside["fleet"] if inside else ():
        asked = f"asked {one['asked']:.0f} s ago" if one["asked"] is not None else "idle"
        typer.echo(f"  {one['name']}: {'here' if one['here'] else 'away'}, {asked}")
    for trouble in inside["trouble"] if inside else ():
        typer.echo(f"  node {trouble['node']}: {trouble['why']} ({trouble['times']} times)")
    typer.echo("\n".join(f"  {line}" for line in told["log"]))
    if told["traceback"]:
        typer.echo(told["traceback"])


@app.command()
def doctor(keys: Keys, control: Control = CONTROL, nodes: Nodes = NODES, json: Json = False) -> None:
    """What is wrong with a fleet: keys, certificates, clocks, versions, connections, and the run's own error.

    Looks at all that the keys in this folder let it: the operator's, or a node's.

    \b
    Examples:
      fedbraid deploy doctor secrets --nodes fl.example.org:8000
    """
    from fedbraid.deploy.doctor import examine

    found = examine(keys, nodes, control)
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
            typer.echo(f"node {trouble['node']}: {trouble['why']}", err=True)
        self.troubles = len(status["trouble"])
        wait = status["wait"]
        if wait["for"] != self.waits and status["at"] - wait["since"] > LONG:
            self.waits = wait["for"]
            typer.echo(f"waiting for {self.waits}, for {status['at'] - wait['since']:.0f} s so far", err=True)
        for r in records:
            words = [f"step {r['step']}/{status['steps']}", f"{r['nodes']} nodes", f"clients {r['clients']}"]
            words += [format_share(r["accuracy"])] if "accuracy" in r else []
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
