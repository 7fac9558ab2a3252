"""Tables of cases that are one test: it goes through all rows, and reports all that fail."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each_row(
    names: str | tuple[str, ...],
    values: Iterable[Any],
    *,
    ids: Callable[[Any], str] | Iterable[str] | None = None,
    collective: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each row of a table, as one test: for rows that cost less than what surrounds a test.

    `pytest.mark.parametrize` makes a test of each row, with its own fixtures and its own search for leaks. Here rows
    share these, so a row may not change what another one finds.

    Args:
        names, values, ids: As `pytest.mark.parametrize` takes them.
        collective: The rows call collectives: the first that fails is the last, since other ranks wait in it. Its error
            is raised as it is, and its id printed.
    """
    named = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    table = [(row,) if len(named) == 1 else tuple(row) for row in values]
    if not table:
        raise ValueError(f"the table of {named} is empty")
    titles = None if ids is None or callable(ids) else tuple(ids)

    def title(number: int) -> str:
        if titles is not None:
            return titles[number]
        return "-".join(ids(value) if callable(ids) else f"{value!r:.60}" for value in table[number])

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in named]
        if len(kept) + len(named) != len(signature.parameters):
            raise ValueError(f"{test.__name__} does not take all of {named}")

        own = signature.replace(parameters=kept)

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            fixtures = own.bind(*args, **kwargs).arguments
            failures = []
            for number, row in enumerate(table):
                try:
                    test(**fixtures, **dict(zip(named, row, strict=True)))
                except (Exception, pytest.fail.Exception):
                    if collective:
                        print(f"the row [{title(number)}] failed")  # noqa: T201 - shown with the error
                        raise
                    failures.append(f"[{title(number)}] {traceback.format_exc()}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(table)} rows failed:\n" + "\n".join(failures), pytrace=False)

        run.__signature__ = own  # type: ignore[attr-defined]  # what pytest reads
        return run

    return decorate
