"""`fedbraid demo`: the main job on data that ships inside the package."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fedbraid.cli.run import remembered
from fedbraid.cli.show import Json, Quiet, entry, give, suggest, table
from fedbraid.run.formatting import best, format_bytes, format_percent, format_seconds, rounds_to, until

if TYPE_CHECKING:
    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
    from fedbraid.run.progress import Screen
    from fedbraid.run.result import Result

TARGET = 0.95


def demo(json: Json = False, quiet: Quiet = False) -> None:
    """Train on 100 clients that hold one digit each, 5 per round: FedAvg beside FedAdaVR.

    With low participation and non-IID data, FedAvg oscillates between the classes of the current cohort. FedAdaVR
    corrects for this with each client's last update, stored on the server, and an adaptive optimizer. Storage and
    traffic are separate choices: memory="int4" stores 4 bits and sends float32; with_codecs(…, up=int4()) sends 4
    bits too.

    \b
    Examples:
      fedbraid demo
      fedbraid demo --json
    """
    from fedbraid.data import tasks
    from fedbraid.run.simulate import simulate
    from fedbraid.schedule import rounds

    begun = time.monotonic()
    task = tasks.load("digits", clients=100, partition="label_chunks(1)")
    results: dict[str, Result] = {}
    screen = _screen(json or quiet)
    try:
        for name, (algorithm, work) in entries().items():
            callbacks = [] if screen is None else [_bar(name, screen)]
            results[name] = simulate(
                task, algorithm, work, rounds(ROUNDS, clients=5), callbacks=callbacks, progress=False
            )
    finally:
        if screen is not None:
            screen.stop()
    rows = [_row(name, result) for name, result in results.items()]
    seconds = time.monotonic() - begun
    if json:
        give(
            {
                "task": task.spec,
                "rounds": ROUNDS,
                "target": TARGET,
                "seconds": round(seconds, 3),
                "runs": rows,
            }
        )
    elif not quiet:
        _show(rows, seconds)


ROUNDS = 200


def entries() -> dict[str, tuple[Algorithm, Work]]:
    """Each with the local work and rates that did best for it over three seeds, of some thirty tried."""
    from fedbraid.algorithms.registry import algorithm_from
    from fedbraid.core.work import Work

    adaptive = Work(lr=0.01, epochs=1, batch=10)
    return {
        "FedAvg": (algorithm_from("fedavg"), Work(lr=0.2, epochs=1, batch=10, momentum=0.9)),
        "FedAdaVR": (algorithm_from("fedadavr('adagrad', lr=0.03)"), adaptive),
        "4 bits kept": (algorithm_from("fedadavr('adagrad', lr=0.03, memory='int4')"), adaptive),
        "4 bits kept and sent": (
            algorithm_from("with_codecs(fedadavr('adagrad', lr=0.03, memory='int4'), up=int4())"),
            adaptive,
        ),
    }


def _screen(hidden: bool) -> Screen | None:
    if hidden:
        return None
    from fedbraid.run.progress import display

    return display()


def _bar(name: str, screen: Screen) -> Any:
    from fedbraid.run.progress import Bar

    return Bar(name, screen)


def _row(name: str, result: Result) -> dict[str, Any]:
    """Accuracies of the last tenth are averaged, for those of FedAvg jump from round to round."""
    history = result.history
    tail = [r["accuracy"] for r in history[-max(1, len(history) // 10) :]]
    reached = rounds_to(history, TARGET)
    return {
        "name": name,
        "algorithm": result.algorithm.name,
        "accuracy": sum(tail) / len(tail),
        "accuracy_worst": min(tail),
        "accuracy_best": best(history),
        "rounds_to_target": reached,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes_kept": remembered(result)[0],
        "bytes_up_to_target": until(history, reached, "bytes_up"),
    }


def _show(rows: list[dict[str, Any]], seconds: float) -> None:
    table(
        f"Digits, 100 clients of one class each, 5 per round, {ROUNDS} rounds ({format_seconds(seconds)})",
        ["", "accuracy", "worst", f"rounds to {TARGET:.0%}", "sent up", "sent down", "kept"],
        [
            [
                row["name"], format_percent(row["accuracy"]), format_percent(row["accuracy_worst"]),
                str(row["rounds_to_target"] or "–"), format_bytes(row["bytes_up"]), format_bytes(row["bytes_down"]),
                format_bytes(row["bytes_kept"]) if row["bytes_kept"] else "–",
            ]
            for row in rows
        ],
    )  # fmt: skip
    entry(
        "",
        "accuracy is the mean over the last tenth of the rounds on the test set, worst their minimum; kept is what the"
        " server stores of its clients' last updates",
    )
    suggest("next", "fedbraid run digits fedadavr --partition 'label_chunks(1)' --per-round 5")
