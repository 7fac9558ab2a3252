"""The tests of PyTorch-Ignite for XLA that cannot pass on the drop-in, with the reasons; docs/migrate.md lists them.

They are of `tests/ignite/distributed` in Ignite's repository, marked with `tpu`.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class CannotPass(NamedTuple):
    """Tests of one file that cannot pass.

    Attributes:
        file: Below `tests/ignite/distributed`.
        tests: The names of the functions.
        reason: Why; of Markdown.
    """

    file: str
    tests: tuple[str, ...]
    reason: str


CANNOT_PASS: Final = (
    CannotPass(
        "utils/test_xla.py",
        ("test_idist_all_reduce_xla", "test_idist_all_gather_xla"),
        "demand more than one rank on one device, of the original too",
    ),
    CannotPass(
        "utils/test_xla.py",
        ("test_idist_all_gather_xla_in_child_proc",),
        "wants NotImplementedError for objects, which are gathered",
    ),
    CannotPass(
        "test_launcher.py",
        ("test_check_idist_parallel_spawn_n_procs_xla",),
        "starts a program that imports the original itself",
    ),
)


def table() -> list[str]:
    """Return the rows of the table in docs/migrate.md."""
    return [f"| `{file}`: {', '.join(f'`{name}`' for name in names)} | {why} |" for file, names, why in CANNOT_PASS]
