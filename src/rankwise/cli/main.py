"""The command `rankwise`: parses its arguments, and prints results."""

from __future__ import annotations

from typing import Final

import click

from rankwise._environment.detect import LAUNCHERS
from rankwise.cli.exit_status import EXIT_ERROR, EXIT_USAGE, fail
from rankwise.cli.launch_command import launch
from rankwise.errors import InvalidArgumentError, RankwiseError

_NAMES: Final = ", ".join(launcher.name for launcher in LAUNCHERS)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankwise", prog_name="rankwise")
def main() -> None:
    """Run PyTorch programs on several ranks, and inspect the launcher's variables.

    Shell completion: eval "$(_RANKWISE_COMPLETE=bash_source rankwise)" (or zsh_source, fish_source).
    """


main.add_command(launch)


@main.command(short_help="Show the rank of this process, and where it comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--launcher",
    default="auto",
    show_default=True,
    metavar="NAME",
    help=f"Read the variables of this launcher: auto, {_NAMES}.",
)
def env(as_json: bool, launcher: str) -> None:
    """Show the rank of this process, and the variable that each value comes from.

    Run it in place of a script to see the variables of a launcher: mpirun -n 2 rankwise env
    """
    from rankwise._session.environ import read_environment, xla_facts  # noqa: PLC0415 - not needed for --help
    from rankwise._session.getters import fact_lines  # noqa: PLC0415

    try:
        reading = read_environment(launcher)
        known = reading.facts() | xla_facts()
    except InvalidArgumentError as error:
        fail(error, EXIT_USAGE)
    except RankwiseError as error:
        fail(error, EXIT_ERROR)
    if as_json:
        import json  # noqa: PLC0415

        facts = {
            name: None if fact is None else {"value": fact.value, "source": fact.source} for name, fact in known.items()
        }
        click.echo(json.dumps({"launcher": reading.launcher, "facts": facts, "warnings": reading.warnings}, indent=2))
        return
    lines = [("launcher", reading.launcher, ""), *fact_lines(known)]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, value, source in lines:
        click.echo(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip())
