"""The hosts of TPU pods. The variables are those that torch_xla's and JAX's readers use; none were recorded."""

from __future__ import annotations

import pytest

from rankwise._environment.detect import detect
from rankwise.errors import LauncherEnvironmentError
from tests.tables import each_row

HOSTS = "t1v-n-0,t1v-n-1,t1v-n-2,t1v-n-3"
POD = {
    "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": HOSTS,
    "TPU_ACCELERATOR_TYPE": "v4-32",
    "TPU_SKIP_MDS_QUERY": "true",
}
SLICES = POD | {
    "MEGASCALE_COORDINATOR_ADDRESS": "job-0-0.job:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}


def test_each_host_is_a_rank_if_the_program_asks_for_it() -> None:
    reading = detect(POD, "tpu")
    assert {name: fact.value for name, fact in reading.known_topology().items()} == {
        "rank": 2,
        "world_size": 4,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 2,
        "num_nodes": 4,
    }
    assert str(reading.rank) == "2 (from TPU_WORKER_ID)"
    assert str(reading.world_size) == "4 (from TPU_WORKER_HOSTNAMES)"
    assert str(reading.host) == "t1v-n-0 (from TPU_WORKER_HOSTNAMES)"
    assert reading.job == detect(POD | {"TPU_WORKER_ID": "0"}, "tpu").job, "the ranks derive one port from it"


def test_an_address_that_is_set_by_hand_takes_precedence() -> None:
    reading = detect(POD | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}, "tpu")
    assert (str(reading.host), str(reading.port)) == ("10.0.0.7 (from MASTER_ADDR)", "1234 (from MASTER_PORT)")


@pytest.mark.parametrize(("worker", "rank"), [("0", 4), ("3", 7)])
def test_hosts_of_several_slices_are_numbered_slice_by_slice(worker: str, rank: int) -> None:
    reading = detect(SLICES | {"TPU_WORKER_ID": worker}, "tpu")
    assert (reading.rank.value, reading.world_size.value) == (rank, 8)
    assert reading.rank.source == "MEGASCALE_SLICE_ID and TPU_WORKER_ID"
    assert str(reading.host) == "job-0-0.job (from MEGASCALE_COORDINATOR_ADDRESS)"


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        ("10.0.0.1:8476,10.0.0.2:8476", "10.0.0.1"),
        ("[fd00::1]:8476,[fd00::2]:8476", "fd00::1"),
        ("fd00::1,b", "fd00::1"),
    ],
)
def test_addresses_of_processes_stand_in_for_names_of_hosts(addresses: str, host: str) -> None:
    reading = detect({"CLOUD_TPU_TASK_ID": "1", "TPU_PROCESS_ADDRESSES": addresses}, "tpu")
    assert str(reading.rank) == "1 (from CLOUD_TPU_TASK_ID)"
    assert reading.host is not None
    assert reading.host.value == host


def test_a_single_host_is_a_world_of_one() -> None:
    reading = detect({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, "tpu")
    assert (reading.rank.value, reading.world_size.value) == (0, 1)


def test_the_variables_alone_make_no_rank() -> None:
    """They are set in each process of a host, also in one that starts ranks itself."""
    for environ in (POD, SLICES):
        reading = detect(environ)
        assert (reading.launcher, reading.world_size.value) == ("none", 1)
        assert "TPU_WORKER_HOSTNAMES has 4 hosts, but this process runs alone" in reading.warnings[0]
    assert detect({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}).warnings == ()
    assert detect(POD | {"RANK": "1", "WORLD_SIZE": "2"}).launcher == "plain"


@each_row(
    ("environ", "named"),
    [
        ({}, ["TPU_WORKER_HOSTNAMES is not set"]),
        ({"TPU_WORKER_ID": "0"}, ["TPU_WORKER_HOSTNAMES is not set"]),
        ({"TPU_WORKER_HOSTNAMES": HOSTS}, ["CLOUD_TPU_TASK_ID is not set", "TPU_WORKER_ID"]),
        (POD | {"TPU_WORKER_ID": "4"}, ["TPU_WORKER_ID=4", "4 hosts"]),
        (POD | {"TPU_WORKER_ID": "-1"}, ["TPU_WORKER_ID=-1 is negative"]),
        (POD | {"TPU_WORKER_ID": "w-0"}, ["TPU_WORKER_ID='w-0' is not a whole number"]),
        (POD | {"TPU_WORKER_HOSTNAMES": "a,,b"}, ["TPU_WORKER_HOSTNAMES='a,,b' has an empty name"]),
        (POD | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999"]),
        (POD | {"MEGASCALE_COORDINATOR_ADDRESS": "a:1"}, ["MEGASCALE_NUM_SLICES is not set"]),
        ({**SLICES, "MEGASCALE_SLICE_ID": "2"}, ["MEGASCALE_SLICE_ID=2", "MEGASCALE_NUM_SLICES=2"]),
    ],
)
def test_incomplete_variables_are_errors_that_name_them(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LauncherEnvironmentError) as raised:
        detect(environ, "tpu")
    assert all(text in str(raised.value) for text in named), str(raised.value)
