"""The command line: `fedbraid COMMAND`, one file a command. Nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from fedbraid.cli import (
    catalogue,
    choose,
    compare,
    cost,
    data,
    demo,
    deploy,
    doctor,
    export,
    report,
    reproduce,
    resume,
    run,
    sweep,
    watch,
)
from fedbraid.cli.help import App
from fedbraid.cli.show import complain, spell_out
from fedbraid.errors import ConfigError, FedbraidError

app = App(
    name="fedbraid",
    help="Compare, tune and deploy federated learning algorithms.",
    epilog=(
        "New here? Run: fedbraid demo. Exit codes: 0 success, 2 user error (one sentence on stderr says what to do), 130"
        " Ctrl-C."
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    demo.demo,
    run.run,
    resume.resume,
    choose.choose,
    compare.compare,
    sweep.sweep,
    report.report,
    watch.watch,
    export.export,
    doctor.doctor,
    data.data,
    cost.cost,
    reproduce.reproduce,
    catalogue.list_,
):
    app.command(name=command.__name__.rstrip("_"))(command)
app.add_typer(deploy.app, name="deploy")


@app.callback(invoke_without_command=True)
def nothing(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the versions of fedbraid, torch, the compiler and the extras, and exit.",
    ),
) -> None:
    if version:
        print(doctor.versions())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user error, 130 after Ctrl-C."""
    try:
        spell_out(sys.stdout, sys.stderr)
        given = list(sys.argv[1:] if arguments is None else arguments)
        _readable(given)
        return app(given, prog_name="fedbraid", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return 130
    except FedbraidError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed it
        return 1
    except OSError as error:
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror}; check the path, its permissions and the disk")
        return 2
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's errors about the command's arguments
            raise
        complain(_usage(error))
        return 2


def _readable(given: list[str]) -> None:
    for word in given:
        if "\0" in word or (not word.isascii() and word != word.encode(errors="replace").decode()):
            raise ConfigError(
                f"the argument {word!a} is not text; leave out what is not UTF-8, and zero bytes"
            )


def _usage(error: Exception) -> str:
    """What is wrong with the arguments, and where to look."""
    text = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "fedbraid"
    return f"{text}{'' if text.endswith('?') else ';'} see `{command} --help`"
