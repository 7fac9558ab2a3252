"""Where ranks meet. Pure."""

from __future__ import annotations

import pytest

from rankwise._environment.detect import detect
from rankwise._rendezvous.endpoint import Endpoint, choose, parse_address
from rankwise._rendezvous.mpi import needs_mpi
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError
from tests.tables import each_row

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[3-4]",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def endpoint(environ: dict[str, str]) -> Endpoint:
    chosen = choose(detect(environ), launching_process=lambda variable: f"the parent without {variable}")
    assert chosen is not None
    return chosen


def test_slurm_steps_meet_on_the_first_node_at_ports_of_their_own() -> None:
    first, second = endpoint(SLURM), endpoint(SLURM | {"SLURM_STEP_ID": "1"})
    assert first.host == "node3"
    assert set(first.ports).isdisjoint(second.ports)
    assert first == endpoint(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}), "the same on every rank"
    assert all(20000 <= port < 32000 for port in first.ports)
    assert len(first.ports) > 8
    assert not first.one_host


def test_one_host_meets_on_loopback_whatever_its_name() -> None:
    one = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    assert (endpoint(one).host, endpoint(one).one_host) == ("127.0.0.1", True)
    named = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "big", "MASTER_PORT": "1234"}
    assert (endpoint(named).host, endpoint(named).ports) == ("127.0.0.1", (1234,))


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_any_name_of_loopback_is_the_same_place(address: str) -> None:
    named = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "1234"}
    assert endpoint(named) == endpoint(named | {"MASTER_ADDR": "127.0.0.1"})


def test_hydra_names_no_job_so_the_process_that_started_the_ranks_does() -> None:
    assert endpoint(MPICH).key == "mpich/the parent without PMI_RANK"


def test_the_agents_store_is_where_it_says() -> None:
    chosen = endpoint(
        {
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "big",
            "MASTER_PORT": "1234",
        }
    )
    assert (chosen.host, chosen.ports, chosen.agent_store) == ("big", (1234,), True)


@each_row(
    ("environ", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but MASTER_PORT is not set"),
        ({"RANKWISE_RANK": "0", "RANKWISE_WORLD_SIZE": "2"}, "RANKWISE_MASTER_ADDR and RANKWISE_MASTER_PORT"),
        (
            MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
            "add `-genv MASTER_ADDR HOST -genv MASTER_PORT PORT`",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "j"},
            "add `-x MASTER_ADDR=HOST`",
        ),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "add `-E MASTER_ADDR=HOST -E MASTER_PORT=PORT`"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f"}, "add `--env=MASTER_ADDR=HOST` to flux run"),
    ],
)
def test_no_place_to_meet_says_what_to_set(environ: dict[str, str], named: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=named):
        endpoint(environ)


@pytest.mark.parametrize(
    ("environ", "needed"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({"MASTER_ADDR": "a"}, False),
        ({"MASTER_PORT": "1234"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
    ],
)
def test_mpi_is_asked_where_nothing_else_has_the_address(environ: dict[str, str], needed: bool) -> None:
    openmpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "j"}
    assert needs_mpi(detect(openmpi | environ)) is needed
    assert not needs_mpi(detect({"RANK": "0", "WORLD_SIZE": "2"})), "nothing shows that they are MPI's"


def test_a_world_of_one_meets_nobody() -> None:
    assert choose(detect({}), launching_process=str) is None
    assert choose(detect({"RANK": "0", "WORLD_SIZE": "1"}), launching_process=str) is None


@pytest.mark.parametrize(("address", "host"), [("a:1", "a"), ("[::1]:29500", "::1"), ("10.0.0.1:65535", "10.0.0.1")])
def test_addresses(address: str, host: str) -> None:
    assert parse_address(address)[0].value == host


@each_row("address", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not host:port"):
        parse_address(address)
