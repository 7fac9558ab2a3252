"""Host lists, against what scontrol printed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise._environment.hostlist import MAX_HOSTS, expand, first
from rankwise.errors import LauncherEnvironmentError
from tests.tables import each_row

TABLE = [
    line.split("\t") for line in (Path(__file__).parents[1] / "data" / "slurm-hostnames.tsv").read_text().splitlines()
]
# Slurm 22.05, which the table is from, rejects text after a bracket; 24.11 expands it, and so do we.
NEWER = {
    "a[1-3,7],b-[08-11],c1-[1-2]-ib0,d[1-2]-[3-4]": (
        "a1 a2 a3 a7 b-08 b-09 b-10 b-11 c1-1-ib0 c1-2-ib0 d1-3 d1-4 d2-3 d2-4"
    ),
    "cn[0001-0003].cluster.local": "cn0001.cluster.local cn0002.cluster.local cn0003.cluster.local",
    "cn[1-2]-ib0": "cn1-ib0 cn2-ib0",
    "x[1-3]y": "x1y x2y x3y",
    "x[1-3]y,x4y": "x1y x2y x3y x4y",
    "prefix-[1-2,5,7-8]-suffix": "prefix-1-suffix prefix-2-suffix prefix-5-suffix prefix-7-suffix prefix-8-suffix",
    "a[9-10]b": "a9b a10b",
    "a[09-10]b": "a09b a10b",
}
# scontrol makes hosts called "node]" of these; nobody wants them.
UNBALANCED = {"node[1-3", "node1-3]"}


@each_row(("hostlist", "printed"), TABLE, ids=[row[0] for row in TABLE])
def test_expands_as_scontrol_does(hostlist: str, printed: str) -> None:
    if hostlist in UNBALANCED or (printed.startswith("ERROR") and hostlist not in NEWER):
        with pytest.raises(LauncherEnvironmentError, match="is not a Slurm host list"):
            expand(hostlist)
    elif hostlist == "node [1-2]":
        assert expand(hostlist) == ["node", "1", "2"]
    else:
        assert expand(hostlist) == NEWER.get(hostlist, printed).split()


@each_row("hostlist", [row[0] for row in TABLE])
def test_the_first_host_is_the_first_of_all(hostlist: str) -> None:
    try:
        hosts = expand(hostlist)
    except LauncherEnvironmentError:
        return
    assert first(hostlist) == (hosts[0] if hosts else None)


@pytest.mark.parametrize(
    "hostlist",
    ["node[00001-50000],gpu[00001-50000]", ",".join(f"n{number}" for number in range(100_000))],
    ids=["ranges", "names"],
)
def test_a_hundred_thousand_hosts(hostlist: str) -> None:
    hosts = expand(hostlist)
    assert (len(hosts), len(set(hosts))) == (100_000, 100_000)
    assert first(hostlist) == hosts[0]


def test_four_brackets_vary_the_last_fastest_then_the_first() -> None:
    hosts = expand("a[0-1]b[0-1]c[0-1]d[0-1]")
    assert hosts[:5] == ["a0b0c0d0", "a0b0c0d1", "a1b0c0d0", "a1b0c0d1", "a0b1c0d0"]
    assert len(set(hosts)) == 16


@each_row("hostlist", ["a[0-99999]", "a[0-999]b[0-999]", "a[1-2][x]", "[]", "a[[1]]", "a[-1]", "a[1--2]"])
def test_refuses_what_is_malformed_or_too_long(hostlist: str) -> None:
    with pytest.raises(LauncherEnvironmentError):
        expand(hostlist)


@pytest.mark.parametrize(
    "hostlist",
    [
        f"a[{','.join(['1-65536'] * 16_000)}]",
        f"a[{'9' * 5000}]",
        f"a[{'0' * 30_000}1-65536]",
        f"{'a' * 100_000}[1-65536]",
        f"a{'[1]' * 30_000}",
        "[" * 100_000,
    ],
    ids=["ranges", "digits", "zeros", "name", "brackets", "open"],
)
def test_a_long_list_is_refused_before_it_takes_memory(hostlist: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LauncherEnvironmentError, match="is not a Slurm host list") as refused:
            expand(hostlist)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert len(str(refused.value)) < 500


EXAMPLES = settings(deadline=None, database=None)


@pytest.mark.soak(50)
def test_any_text_expands_or_is_refused(seed: int) -> None:
    @hypothesis.seed(seed)
    @EXAMPLES
    @given(st.text(alphabet="ab01-,[] ", max_size=20))
    def check(text: str) -> None:
        try:
            hosts = expand(text)
        except LauncherEnvironmentError:
            return
        assert len(hosts) <= MAX_HOSTS
        assert first(text) == (hosts[0] if hosts else None)
        assert all(host and "," not in host for host in hosts)

    check()


@pytest.mark.slow
@pytest.mark.soak(50)
def test_names_without_brackets_stay_as_they_are(seed: int) -> None:
    @hypothesis.seed(seed)
    @EXAMPLES
    @given(st.lists(st.from_regex(r"[a-z]{1,5}[0-9]{0,3}", fullmatch=True), max_size=10))
    def check(names: list[str]) -> None:
        assert expand(",".join(names)) == names

    check()
