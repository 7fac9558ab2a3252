"""The command `rankwise`: parses, calls, prints."""

from __future__ import annotations

import sys

import click

from rankwise.errors import InvalidArgumentError, RankFailedError, RankwiseError

FOUND_A_FAULT = 1
MISUSED = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankwise")
def main() -> None:
    """One script, any number of ranks."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--nproc", type=int, required=True, help="How many ranks to start on this host.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as for python -m.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(nproc: int, module: bool, target: str, args: tuple[str, ...]) -> None:
    """Run TARGET, a Python script, as the ranks of one world on this host; ARGS go to it."""
    from rankwise.launch.report import exit_status  # noqa: PLC0415 - `rankwise env` does not wait for this
    from rankwise.launch.scripts import launch_script  # noqa: PLC0415

    try:
        launch_script(target, args, nproc=nproc, module=module)
    except InvalidArgumentError as error:
        _fail(error, MISUSED)
    except RankFailedError as error:
        _fail(error, exit_status(error.failures[0]))
    except RankwiseError as error:
        _fail(error, FOUND_A_FAULT)
    except KeyboardInterrupt:
        sys.exit(130)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--launcher", default="auto", show_default=True, help="Whose variables to believe.")
def env(as_json: bool, launcher: str) -> None:
    """Show who this process is, and which variable decided each value."""
    from rankwise.session.current import read_environment  # noqa: PLC0415 - not needed for --help
    from rankwise.session.identity import fact_lines  # noqa: PLC0415

    try:
        reading = read_environment(launcher)
    except InvalidArgumentError as error:
        _fail(error, MISUSED)
    except RankwiseError as error:
        _fail(error, FOUND_A_FAULT)
    if as_json:
        import json  # noqa: PLC0415

        facts = {
            name: None if fact is None else {"value": fact.value, "source": fact.source}
            for name, fact in reading.facts().items()
        }
        click.echo(json.dumps({"launcher": reading.launcher, "facts": facts, "warnings": reading.warnings}, indent=2))
        return
    lines = [("launcher", reading.launcher, ""), *fact_lines(reading.facts())]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, value, source in lines:
        click.echo(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip())


def _fail(error: RankwiseError, status: int) -> None:
    click.echo(f"rankwise: {error}", err=True)
    sys.exit(status)
