"""Defaults of `rankwise launch`: torchrun's variables PET_*, and [tool.rankwise] of a pyproject.toml.

An option of the command line comes first, then the variable, then the file. An error in a value names its source.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

_TABLE: Final = "tool.rankwise"
# The keys of the table that a command has read, by the names of its parameters: an option may have several names.
_KEYS: Final = "tool.rankwise keys"
# The options for which torchrun reads a variable, by the name that is part of it.
PET_OPTIONS: Final = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "local_addr", "standalone"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts", "role"),
    *("module", "no_python", "run_path", "start_method", "virtual_local_rank", "monitor_interval"),
    *("log_dir", "redirects", "tee", "local_ranks_filter", "event_log_handler"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "signals_to_handle", "shutdown_timeout"),
)


class CommandWithDefaults(click.Command):
    """A command whose options have defaults in variables and in a file."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        for option in self._options():
            for name in set(PET_OPTIONS).intersection(_names(option)):
                option.envvar = f"PET_{name.upper()}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, with defaults for the options that it lacks."""
        file, table = (None, {}) if ctx.resilient_parsing else _nearest_table()
        ctx.default_map, ctx.meta[_KEYS] = self._values(file, table)
        ctx.meta[_TABLE] = file
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if isinstance(error.param, click.Option) and (source := _source(ctx, error.param)):
                raise click.UsageError(f"{source}: {error.message}", ctx) from None
            raise

    def _options(self) -> list[click.Option]:
        return [option for option in self.params if isinstance(option, click.Option)]

    def _values(self, file: Path | None, table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the defaults of a table, and its keys, by the parameters of the command.

        Raises:
            click.UsageError: There is no such option, or its value is of another type.
        """
        parameters = {name: option.name or "" for option in self._options() for name in _names(option)}
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=1)
                hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else "; see rankwise launch --help"
                raise click.UsageError(f"[{_TABLE}] of {file} has {key!r}, which is no option of launch{hint}")
            if isinstance(value, list):
                value = ",".join(map(str, value))  # noqa: PLW2901 - as it is written on the command line
            if not isinstance(value, (bool, int, float, str)):
                raise click.UsageError(
                    f"[{_TABLE}] of {file} has {key} = {value!r}, which is neither a text, a number, a bool nor a list"
                )
            values[parameters[name]] = value if isinstance(value, bool) else str(value)
            keys[parameters[name]] = key
        return values, keys


def sources_text(ctx: click.Context) -> str:
    """Return the options that have values from elsewhere than the command line, for an error message; "" if none."""
    options = [option for option in ctx.command.params if isinstance(option, click.Option)]
    sources = [source for option in options if (source := _source(ctx, option))]
    return f" (set outside of the command line: {', '.join(sources)})" if sources else ""


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether an option is on the command line."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _source(ctx: click.Context, option: click.Option) -> str:
    """Return where the value of an option comes from, if it is not from the command line, with the value."""
    source = ctx.get_parameter_source(option.name or "")
    if source is ParameterSource.ENVIRONMENT:
        return f"{option.envvar}={option.value_from_envvar(ctx)!r}"
    if source is ParameterSource.DEFAULT_MAP:
        value = (ctx.default_map or {}).get(option.name or "")
        keys: Mapping[str, str] = ctx.meta[_KEYS]
        return f"{keys[option.name or '']} = {value!r} in [{_TABLE}] of {ctx.meta[_TABLE]}"
    return ""


def _names(option: click.Option) -> list[str]:
    """Return the long names of an option, with underscores."""
    return [name[2:].replace("-", "_") for name in option.opts if name.startswith("--")]


def _nearest_table() -> tuple[Path | None, Mapping[str, Any]]:
    """Return the nearest pyproject.toml with a table for this command, in the working directory or above, and it.

    Raises:
        click.UsageError: The file cannot be read or parsed.
    """
    for file in _candidates():
        try:
            data = file.read_bytes()
            if _TABLE.encode() not in data:  # most have none: they are not parsed
                continue
            table = _parsed(data.decode()).get("tool", {}).get("rankwise")
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file} cannot be read: {error}") from None
        if isinstance(table, dict):
            return file, table
    return None, {}


def _parsed(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - a command without such a file does not wait for it
    else:
        import tomli as tomllib  # noqa: PLC0415 - likewise
    return tomllib.loads(text)


def _candidates() -> Iterator[Path]:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted, which is reported later
        return
    yield from (file for folder in (here, *here.parents) if (file := folder / "pyproject.toml").is_file())
