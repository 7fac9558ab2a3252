"""The checks of `rankwise doctor`: each a pure function of the facts of a rank, a host or all ranks, in `CHECKS`.

FAIL is what ends a job or makes it wrong, WARN what makes it slow or may end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, TypeAlias

from rankwise._doctor.facts import UNLIMITED, Facts, Link
from rankwise._net.addresses import is_loopback
from rankwise._text import ranks_by_value, ranks_on_hosts_text

Level: TypeAlias = Literal["OK", "WARN", "FAIL"]
Ranks: TypeAlias = Sequence[Facts]
# What is wrong, and on which ranks.
Said: TypeAlias = tuple[Level, str]
Problem: TypeAlias = tuple[Level, str, tuple[int, ...]]
Check: TypeAlias = Callable[[Ranks, Sequence[Link]], Iterator[Problem]]

_MIB: Final = 1 << 20
# For lookups of names, and for clocks.
_SECOND: Final = 1.0
# Processes and threads that a rank with loaders of data starts, and those that it cannot do without.
_USUAL_PROCESSES, _FEWEST_PROCESSES = 64, 16
_USUAL_FILES: Final = 1024
# Between versions of other packages, messages differ.
_MAY_DIFFER: Final = frozenset({"Python", "NVIDIA driver"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check: what is wrong and where, or that all is well.

    Attributes:
        level: "OK", "WARN" or "FAIL".
        check: The name of the check.
        text, remedy: What is wrong, and what to do; or what was checked, and "".
        ranks, hosts: Where; empty if nothing is wrong, or it is not known.
    """

    level: Level
    check: str
    text: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    def line(self, world_size: int, hosts: Mapping[int, str]) -> str:
        """Return the finding as a line."""
        everywhere = len(self.ranks) == world_size > 1
        where = f"all {world_size} ranks" if everywhere else ranks_on_hosts_text(self.ranks, hosts)
        parts = f"{where}: {self.text}" if self.ranks else self.text, self.remedy
        return f"{self.level:<4}  {self.check:<17}  {'; '.join(filter(None, parts))}"


def examine(ranks: Ranks, links: Sequence[Link]) -> list[Finding]:
    """Return the findings of all checks: one for each problem, with all ranks that have it."""
    host_of = {one.rank: one.host for one in ranks}
    findings = []
    for name, (check, subject, remedy) in CHECKS.items():
        ranks_of: dict[Said, list[int]] = {}
        for level, text, where in check(ranks, links):
            ranks_of.setdefault((level, text), []).extend(where)
        for (level, text), found in ranks_of.items():
            hosts = tuple(dict.fromkeys(host_of[rank] for rank in sorted(found)))
            where = tuple(sorted(found))
            findings.append(Finding(level=level, check=name, text=text, remedy=remedy, ranks=where, hosts=hosts))
        if not ranks_of:
            findings.append(Finding(level="OK", check=name, text=subject))
    return findings


def _of_each_rank(say: Callable[[Facts], Iterator[Said]]) -> Check:
    return lambda ranks, _: ((*said, (one.rank,)) for one in ranks for said in say(one))


def _of_each_host(say: Callable[[Ranks], Iterator[Said]]) -> Check:
    return lambda ranks, _: ((*said, _numbers(here)) for here in _hosts(ranks) for said in say(here))


def _hosts(ranks: Ranks) -> list[list[Facts]]:
    """Return the ranks of each host."""

    def host(one: Facts) -> tuple[str, str]:
        return one.host, one.host_id

    return [list(here) for _, here in groupby(sorted(ranks, key=host), host)]


def _numbers(ranks: Ranks) -> tuple[int, ...]:
    return tuple(one.rank for one in ranks)


def _differ(name: str, ranks: Ranks, values: Sequence[str], level: Level) -> Iterator[Problem]:
    """Name the ranks that do not have the most usual value."""
    usual = Counter(values).most_common(1)[0][0]
    others = tuple(one.rank for one, value in zip(ranks, values, strict=True) if value != usual)
    if others:
        yield level, f"{name}: {ranks_by_value(_numbers(ranks), values)}", others


@_of_each_rank
def _variables(one: Facts) -> Iterator[Said]:
    yield from (("WARN", " ".join(warning.split())) for warning in one.warnings)


@_of_each_rank
def _interfaces(one: Facts) -> Iterator[Said]:
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if missing := {part for part in one.variable(name).split(",") if part} - {*one.interfaces}:
            yield "FAIL", f"{name}={one.variable(name)}, but there is no {missing.pop()}: {', '.join(one.interfaces)}"
    for name, present in (("NCCL_SOCKET_IFNAME", one.interfaces), ("NCCL_IB_HCA", one.adapters)):
        # The beginnings of names, of which NCCL takes those that there are; "=" is for complete ones, "^" for others.
        value = one.variable(name)
        wanted = [part.partition(":")[0] for part in value.removeprefix("=").split(",") if part]
        found = [each for each in present if each.startswith(tuple(wanted))]
        if wanted and not value.startswith(("^", "=^")) and not found:
            yield "FAIL" if one.gpus else "WARN", f"{name}={value}, but there is only {', '.join(present) or 'none'}"


@_of_each_rank
def _visible_devices(one: Facts) -> Iterator[Said]:
    value = one.variable("CUDA_VISIBLE_DEVICES")
    if any(part.strip().isdecimal() and int(part) >= one.gpus for part in value.split(",")):
        yield "FAIL" if one.gpus else "WARN", f"CUDA_VISIBLE_DEVICES={value}, but the host has {one.gpus} NVIDIA GPUs"


def _devices(ranks: Ranks, _: Sequence[Link]) -> Iterator[Problem]:
    yield from (("FAIL", one.device_problem, (one.rank,)) for one in ranks if one.device_problem)
    yield from _differ("devices", ranks, [one.device.partition(":")[0] or "none" for one in ranks], "FAIL")
    for device in dict.fromkeys(one.device_id for one in ranks if one.device_id):
        same = [one for one in ranks if one.device_id == device]
        if len(same) > 1:
            yield "FAIL", f"they have the same device, {same[0].device}", _numbers(same)


def _versions(ranks: Ranks, _: Sequence[Link]) -> Iterator[Problem]:
    for name in dict.fromkeys(version.partition("=")[0] for one in ranks for version in one.versions):
        values = [one.version(name) or "none" for one in ranks]
        yield from _differ(name, ranks, values, "WARN" if name in _MAY_DIFFER else "FAIL")


@_of_each_rank
def _names(one: Facts) -> Iterator[Said]:
    if one.names_problem:
        yield "WARN", f"the name of the host, {one.host}, has no address: {one.names_problem}"
    elif one.forward_seconds > _SECOND:
        yield "WARN", "a lookup of the host's own name takes more than 1 s"


@_of_each_rank
def _reverse_names(one: Facts) -> Iterator[Said]:
    if one.reverse_seconds > _SECOND:
        yield "WARN", "a lookup of the name of an address takes more than 1 s, and torch makes one for each connection"


def _loopback(ranks: Ranks, _: Sequence[Link]) -> Iterator[Problem]:
    hosts = _hosts(ranks)
    for here in hosts if len(hosts) > 1 else ():
        if here[0].names and is_loopback(here[0].names[0]) and not here[0].variable("GLOO_SOCKET_IFNAME"):
            yield "WARN", f"the name of the host is of loopback: {here[0].host} is {here[0].names[0]}", _numbers(here)


def _addresses(ranks: Ranks, _: Sequence[Link]) -> Iterator[Problem]:
    hosts = _hosts(ranks)
    holders = Counter(address for here in hosts for address in {one.address for one in here if one.interface})
    for one in ranks:
        if holders[one.address] > 1:
            yield "FAIL", f"the address {one.address} ({one.interface}) is also that of another host", (one.rank,)


def _ports(ranks: Ranks, links: Sequence[Link]) -> Iterator[Problem]:
    host_of = {one.rank: one.host for one in ranks}
    failed = [link for link in links if link.problem]
    # A host that no other can reach is at fault, and not all the others.
    faults = Counter(rank for link in failed for rank in (link.source, link.target))
    for link in failed:
        worst = max(link.target, link.source, key=lambda rank: faults[rank])
        yield "FAIL", f"no way from {host_of[link.source]} to {host_of[link.target]}: {link.problem}", (worst,)


def _clocks(_: Ranks, links: Sequence[Link]) -> Iterator[Problem]:
    for link in links:
        if not link.problem and link.target == 0 and abs(link.offset) > _SECOND + link.round_trip:
            side = "ahead of" if link.offset < 0 else "behind"
            yield "WARN", f"the clock is {abs(link.offset):.1f} s {side} that of rank zero", (link.source,)


@_of_each_host
def _open_files(here: Ranks) -> Iterator[Said]:
    most = min(one.files for one in here)
    if most < _USUAL_FILES:
        yield "FAIL" if most < 32 + 4 * len(here) else "WARN", f"a process may open {most} files"


@_of_each_rank
def _locked_memory(one: Facts) -> Iterator[Said]:
    if one.adapters and one.locked_memory < 64 * _MIB:
        yield "FAIL", f"{one.locked_memory >> 10} KiB may be locked: too few for {one.adapters[0]}"


@_of_each_host
def _processes(here: Ranks) -> Iterator[Said]:
    left = min(one.processes for one in here)
    if left < _USUAL_PROCESSES * len(here):
        level: Level = "FAIL" if left < _FEWEST_PROCESSES * len(here) else "WARN"
        yield level, f"at most {left} more processes and threads may be started, for {len(here)} ranks"


@_of_each_host
def _shared_memory(here: Ranks) -> Iterator[Said]:
    free = here[0].shared_memory or 0
    if free < 128 * _MIB * len(here):  # Docker gives a container 64, which loaders of data exceed
        level: Level = "FAIL" if free < 8 * _MIB * len(here) else "WARN"
        yield level, f"{free >> 20} MiB of shared memory are free, for {len(here)} ranks"


@_of_each_host
def _memory(here: Ranks) -> Iterator[Said]:
    left = min((one.memory for one in here if one.memory is not None), default=UNLIMITED)
    if left < 1024 * _MIB * len(here):
        level: Level = "FAIL" if left < 256 * _MIB * len(here) else "WARN"
        yield level, f"{left >> 20} MiB are left on the host or in the control group, for {len(here)} ranks"


@_of_each_host
def _threads(here: Ranks) -> Iterator[Said]:
    cores = {core for one in here for core in one.cores}
    cpus = min([float(len(cores)), *(one.quota for one in here if one.quota is not None)])
    threads = sum(_threads_of(one) for one in here)
    if threads > cpus and len(here) > 1:
        yield "WARN", f"{threads} threads of {len(here)} ranks share {cpus:g} CPUs"


def _threads_of(one: Facts) -> int:
    """Return the number of threads with which torch computes."""
    first = one.variable("OMP_NUM_THREADS").partition(",")[0]
    return max(1, int(first)) if first.isdecimal() else len(one.cores)


@_of_each_host
def _affinity(here: Ranks) -> Iterator[Said]:
    cores = {core for one in here for core in one.cores}
    if len(cores) == 1 < here[0].host_cores:
        yield "WARN", f"they run on CPU {cores.pop()} alone, of {here[0].host_cores}"


@_of_each_rank
def _full_folders(one: Facts) -> Iterator[Said]:
    for folder in one.folders:
        if folder.problem or folder.free < 256 * _MIB:
            level: Level = "FAIL" if folder.problem or folder.free < 16 * _MIB else "WARN"
            yield level, f"{folder.role} {folder.path}: {folder.problem or f'{folder.free >> 20} MiB are free'}"


def _different_folders(ranks: Ranks, _: Sequence[Link]) -> Iterator[Problem]:
    values = [f"{one.folders[0].path} ({one.folders[0].kind or 'unknown'})" for one in ranks]
    yield from _differ("working directory", ranks, values, "WARN")


# By the name of the check: its function, what is shown if nothing is wrong, and the remedy.
CHECKS: Final[Mapping[str, tuple[Check, str, str]]] = {
    "variables": (_variables, "those of the launcher are complete, and of this run", "see rankwise env; unset them"),
    "interfaces": (_interfaces, "those that variables name exist", "unset the variable, or name another"),
    "visible devices": (
        _visible_devices,
        "those of CUDA_VISIBLE_DEVICES exist",
        "unset it, or ask for more GPUs",
    ),
    "devices": (_devices, "each rank has its own", "see nvidia-smi, LOCAL_RANK, CUDA_VISIBLE_DEVICES, --gpus-per-task"),
    "versions": (_versions, "Python, rankwise, torch, NCCL and driver are the same", "install the same on all hosts"),
    "names": (_names, "each host finds its own address", "correct /etc/hosts, or the servers in /etc/resolv.conf"),
    "reverse names": (_reverse_names, "answered within 1 s", "RES_OPTIONS='timeout:1 attempts:1', or /etc/resolv.conf"),
    "loopback": (_loopback, "no host has a name of loopback", "correct /etc/hosts, or set GLOO_SOCKET_IFNAME"),
    "addresses": (_addresses, "each host has its own", "set MASTER_ADDR and GLOO_SOCKET_IFNAME for another network"),
    "ports": (_ports, "each host connects to each other one", "open the firewall for TCP, or set GLOO_SOCKET_IFNAME"),
    "clocks": (_clocks, "equal within 1 s", "start a time service, such as chronyd, on all hosts"),
    "open files": (_open_files, "enough", "ulimit -n 65536; LimitNOFILE= of a service"),
    "locked memory": (_locked_memory, "enough", "ulimit -l unlimited; LimitMEMLOCK=infinity of a service"),
    "processes": (_processes, "enough", "raise ulimit -u, or pids.max of the control group"),
    "shared memory": (_shared_memory, "enough", "docker run --shm-size 8g or --ipc host; remove files in it"),
    "memory": (_memory, "enough", "ask for more (--mem of Slurm), or start fewer ranks"),
    "threads": (_threads, "not more than CPUs", "OMP_NUM_THREADS, --cpus-per-task of Slurm, or fewer ranks"),
    "affinity": (_affinity, "not all on one CPU", "--cpus-per-task of srun, --bind-to none of mpirun, taskset"),
    "full folders": (_full_folders, "working directory and TMPDIR have room", "remove files, or use other folders"),
    "different folders": (_different_folders, "all work in the same", "start all in the same shared folder"),
}
