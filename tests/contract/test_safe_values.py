"""One body for every world: `safe=True`, with values that are taken, and with pickles that were made to run code."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime as dt
import enum
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._collectives import serialization
from rankwise._collectives.out_of_band import Pickled
from rankwise._collectives.safe_types import _definitions
from rankwise._comm.group import Comm
from tests.contract.without_frames import without_frames

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3), pytest.mark.slow_with_ranks(3)]

# What hostile pickles have run in this process.
ran: list[object] = []


def run_code(value: object = None) -> object:
    ran.append(value)
    return value


class Unknown:
    """A class that nobody has registered."""


class Phase(enum.Enum):
    TRAIN = "train"


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


class Stateful:
    """A class whose values have code for their state."""

    def __getstate__(self) -> dict[str, int]:
        return {"n": 1}

    def __setstate__(self, state: object) -> None:
        run_code(state)


class ForgedPickle:
    """A value whose pickle was made by hand; see `forging`."""

    def __init__(self, stream: bytes, table: bytes = b"") -> None:
        self.stream = stream
        self.table = table


class _ForgedPickled(Pickled):
    def __init__(self, value: object, make_pickler: Any) -> None:
        is_forged = isinstance(value, ForgedPickle)
        super().__init__(None if is_forged else value, make_pickler)
        if isinstance(value, ForgedPickle):
            self.chunks = [value.stream]
            self.table = value.table or self.table


@pytest.fixture(autouse=True)
def forging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this rank send what a hostile program would: a `ForgedPickle` is sent as it is."""
    monkeypatch.setattr(serialization, "Pickled", _ForgedPickled)
    before = dict(_definitions)
    ran.clear()
    yield
    assert not ran
    _definitions.clear()
    _definitions.update(before)


def calls_with(value: object, comm: Comm, **settings: Any) -> list[Callable[[], Any]]:
    """Return calls of all functions that take `safe`, in which the last rank sends a value."""
    last = comm.size - 1
    own = value if rw.get_rank() == last else "harmless"
    return [
        lambda: rw.all_gather(own, safe=True, **settings),
        lambda: rw.gather(own, dst=0, safe=True, **settings),
        lambda: rw.broadcast(own, src=last, safe=True, **settings),
        lambda: rw.scatter([own] * comm.size, src=last, safe=True, **settings),
    ]


def assert_refused(value: object, text: str, comm: Comm) -> None:
    """Check that all ranks raise the same error, and that the next collective works."""
    for call in calls_with(value, comm):
        with pytest.raises(rw.PayloadTypeError) as caught:
            call()
        assert f"a value of rank {comm.size - 1} " in str(caught.value)
        assert text in str(caught.value)
        assert len({*rw.all_gather(str(caught.value))}) == 1


def reduction(name: str, argument: bytes = b"N", module: str = __name__) -> bytes:
    """Return the steps that call a function with an argument."""
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n" + argument + b"\x85R"


def forged(steps: bytes) -> ForgedPickle:
    return ForgedPickle(b"\x80\x05" + steps + b".")


def values() -> list[Any]:
    return [
        *(None, True, 2**70, 0.5, 1j, "é", b"b", bytearray(b"b"), ..., slice(1, 2), range(3), int),
        {"a": [1, (2, {3}, frozenset({4}))]},
        collections.deque([1, 2], 5),
        collections.defaultdict(list, {1: [2]}),
        collections.Counter("aab"),
        *(np.float32(0.5), np.str_("é"), np.datetime64("2020-02-29"), np.dtype("f4"), np.dtype([("a", "i4", 2)])),
        *(torch.float32, torch.Size([1, 2]), torch.device("cpu")),
    ]


def arrays() -> list[Any]:
    return [
        np.arange(6.0).reshape(2, 3).T,
        np.array(5),
        np.array([], dtype="f4"),
        np.zeros(2000, dtype=[("a", "i1"), ("b", "f8")]),
        np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.array(["a", "bcd"]),
        np.array("", dtype="U"),
        np.array(["2020-02-29"], dtype="M8[D]"),
        np.broadcast_to(np.float32(1), (2, 3)),
        np.array([[1, "a"], [None, {2}]], dtype=object),
    ]


def test_builtin_values_arrays_and_tensors_are_taken(comm: Comm) -> None:
    for value in values():
        found = rw.all_gather(value, safe=True)
        assert found == [value] * comm.size
        assert {type(one) for one in found} == {type(value)}
    for array in arrays():
        found = rw.broadcast([array], src=comm.size - 1, safe=True)[0]
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        found.flat[:1] = found.flat[:1]
    items = rw.all_gather(np.array([np.array(5), [1, 2]], dtype=object), safe=True)[0]
    assert (type(items[0]), items[1]) == (np.ndarray, [1, 2])


def test_tensors_of_all_kinds_are_taken(comm: Comm) -> None:
    named = torch.ones(2)
    named.label = "a user's attribute"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    parameter.label = named.label  # type: ignore[attr-defined]
    grid = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    for value in [grid, grid.t(), (grid * 1j).conj(), torch.ones(5000), torch.ones(0), named, parameter]:
        for found in (*rw.all_gather(value, safe=True), rw.scatter([[value]] * comm.size, safe=True)[0]):
            assert type(found) is type(value)
            assert torch.equal(found, value)
            assert found.requires_grad == value.requires_grad
            assert vars(found) == vars(value)


def test_the_state_of_a_model_is_taken(comm: Comm) -> None:
    # No parameter is drawn: ranks may be threads, and share the generator.
    model = torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    found = rw.gather(state, safe=True)
    for theirs in found or []:
        assert list(theirs) == list(state)
        assert theirs._metadata == state._metadata  # type: ignore[attr-defined]
        model.load_state_dict(theirs)
    assert (found is None) == (rw.get_rank() != 0)


def test_registered_types_are_taken_and_others_named(comm: Comm) -> None:
    assert rw.register_safe(Point) is Point
    rw.register_safe(Phase)
    value = [Point(1, Phase.TRAIN), {Phase.TRAIN: Point(torch.ones(2).sum().item())}]
    assert rw.all_gather(value, safe=True) == [value] * comm.size
    advice = "; register it with rankwise.register_safe"
    assert_refused(
        [1, dt.date(2020, 2, 29)], f"has a datetime.date, which safe=True refuses{advice}(datetime.date)", comm
    )
    assert_refused({"points": [Point(Unknown())]}, f"has a {__name__}.Unknown, which", comm)
    assert_refused(Unknown, f"has a {__name__}.Unknown, which", comm)
    assert_refused(["x" * 100_000, Unknown()], f"{advice}({__name__}.Unknown)", comm)


def test_one_rank_that_has_not_registered_a_class_refuses_it_on_all(comm: Comm) -> None:
    if rw.get_rank() != comm.size - 1:
        rw.register_safe(Point)
    with pytest.raises(rw.PayloadTypeError, match=f"a value of rank 0 has a {__name__}.Point, which"):
        rw.broadcast(Point(1), safe=True)


def test_values_of_other_kinds_are_named(comm: Comm) -> None:
    assert_refused(lambda: 1, "has a function or class that is not found by its name", comm)
    assert_refused([type("Local", (), {})()], "has a function or class that is not found by its name", comm)
    assert_refused(os.getpid, f"refers to {os.getpid.__module__}.getpid, which safe=True refuses", comm)
    assert_refused(torch.ones(2).to_sparse(), "_rebuild_sparse_tensor", comm)
    assert_refused(np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), "_reconstruct", comm)
    assert_refused(np.ma.array([1]), "numpy.ma", comm)


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return run_code, ("attack",)


def test_code_in_any_place_of_a_value_is_refused(comm: Comm) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tensor.label = parameter.label = Attack()  # type: ignore[attr-defined]
    places: list[object] = [
        Attack(),
        {Attack(): 1},
        {(1, Attack())},
        slice(Attack()),
        np.array([1, Attack()], dtype=object),
        {"x": tensor},
        [parameter],
        collections.OrderedDict(a=Attack()),
        [torch.ones(5000), "x" * 10_000, Attack()],
    ]
    for value in places:
        assert_refused(value, f"refers to {__name__}.run_code, which safe=True refuses", comm)


def test_pickles_by_hand_are_refused(comm: Comm) -> None:
    name = __name__.encode()
    by_memo = b"\x8c" + bytes([len(name)]) + name + b"\x94" + b"\x8c\x08run_code\x94" + b"]h\x00h\x01\x93N\x85Ra"
    assert_refused(forged(by_memo), "run_code", comm)
    assert_refused(forged(reduction("system", b"Vtrue\n", "os")), "refers to os.system, which", comm)
    assert_refused(forged(b"(Vtrue\nios\nsystem\n"), "refers to os.system, which", comm)
    assert_refused(forged(b"(cos\nsystem\nVtrue\no"), "refers to os.system, which", comm)
    for builtin in ("getattr", "eval", "exec", "__import__", "type", "object"):
        assert_refused(forged(reduction(builtin, module="builtins")), f"builtins.{builtin}", comm)
    assert_refused(forged(reduction("int.__class__", module="builtins")), "builtins.int.__class__", comm)
    assert_refused(
        forged(reduction("_load_from_bytes", module="torch.storage")), "torch.storage._load_from_bytes", comm
    )
    assert_refused(forged(reduction("import_module", b"Vthis\n", "importlib")), "importlib.import_module", comm)
    assert_refused(forged(reduction("missing", module="no.such.module")), "no.such.module.missing", comm)
    assert_refused(forged(reduction("x\x1b[2J")), "x\\x1b[2J", comm)
    assert_refused(forged(b"Pid\n"), "cannot be read with safe=True", comm)
    assert_refused(forged(b"Vid\nQ"), "cannot be read with safe=True", comm)
    assert_refused(ForgedPickle(b"\x80\x05]"), "cannot be read with safe=True", comm)
    assert_refused(forged(b"0" * 5000), "cannot be read with safe=True", comm)


def test_states_and_items_are_for_instances_alone(comm: Comm) -> None:
    rw.register_safe(Point)
    point = b"c" + __name__.encode() + b"\nPoint\n"
    states = [
        point + b"N}Vx\nI1\ns\x86b",  # the class itself
        b"cbuiltins\nlist\n}Vx\nI1\nsb",
        b"ctorch\nfloat32\n}b",
        b"crankwise._collectives.safe_types\nmake_dtype\n}Vx\nI1\nsb",
        reduction("make_dtype", b"V<f8\n", "rankwise._collectives.safe_types") + b"(I3\nV>\nNNNI-1\nI-1\nI0\ntb",
        b"crankwise._pickling\n_named\n}Vx\nI1\nsb",
        reduction("device", b"Vcpu\n", "torch") + b"}b",
        point + b"(I1\ne",
        b"ctorch\nSize\n)\x81",
    ]
    for steps in states:
        assert_refused(forged(steps), "cannot be read with safe=True", comm)
    assert not hasattr(Point, "x")
    assert np.dtype("f8").byteorder == "="


def test_memory_is_read_within_the_value_alone(comm: Comm) -> None:
    """These steps are known; what they would make is not, so that the error is that of the ranks that receive it."""
    types = "rankwise._collectives.safe_types"
    array = b"crankwise._collectives.out_of_band\nout_of_band_array\n(I0\n"
    tensor = b"crankwise._collectives.out_of_band\nout_of_band_tensor\n(I0\nctorch\nfloat32\n"
    table = pickle.dumps(((8).to_bytes(8, "little"), None))
    forgeries = [
        ForgedPickle(b"\x80\x05" + array + reduction("make_dtype", b"VO\n", types) + b"(I1\nttR.", table),
        ForgedPickle(b"\x80\x05" + array + b"VO\n(I1\nttR.", table),
        ForgedPickle(b"\x80\x05" + array + reduction("make_dtype", b"VT\n", types) + b"(I1\nttR.", table),
        ForgedPickle(b"\x80\x05" + array + reduction("make_dtype", b"Vf8\n", types) + b"(I9\nttR.", table),
        ForgedPickle(b"\x80\x05" + tensor + b"(I9\nt(t\x89tR.", table),
        ForgedPickle(b"\x80\x05" + tensor + b"(I9\nt(I1\nt\x89tR.", table),
        ForgedPickle(b"\x80\x05N.", pickle.dumps(((-8).to_bytes(8, "little", signed=True), None))),
        forged(
            b"c"
            + types.encode()
            + b"\nmake_array_scalar\n"
            + reduction("make_dtype", b"VO\n", types)
            + b"C\x08aaaaaaaa\x86R"
        ),
    ]
    for value in forgeries:
        with pytest.raises(rw.PayloadTypeError, match="cannot be unpickled here"):
            rw.broadcast(value, safe=True)
    assert rw.all_gather(1, safe=True) == [1] * comm.size


def test_tables_and_headers_have_no_definitions(comm: Comm) -> None:
    """Neither those that reading a table would run, nor the definitions of `__main__` in it."""
    hostile = pickle.dumps(Attack())
    with pytest.raises(rw.PayloadTypeError, match="cannot be unpickled here"):
        rw.broadcast(ForgedPickle(pickle.dumps(1), table=hostile), safe=True)
    with pytest.raises(pickle.UnpicklingError, match="run_code is not allowed"):
        serialization.Header.decode(hostile, safe=True)
    table = pickle.dumps((b"", None, hostile, ""))
    value: object = ForgedPickle(pickle.dumps(1), table=table)
    assert rw.broadcast(value, safe=True) == 1
    named = b"crankwise._pickling\n_named\nVPoint\nVfingerprint\n\x86R"
    assert_refused(ForgedPickle(b"\x80\x05" + named + b".", table), "has a Point, which", comm)


def test_codes_of_extensions_are_refused(comm: Comm) -> None:
    copyreg.add_extension(__name__, "run_code", 0xF0)
    try:
        pickle.loads(b"\x80\x05\x82\xf0.")  # which keeps the definition for all unpicklers
        assert_refused(forged(b"\x82\xf0N\x85R"), "codes of extensions", comm)
        assert_refused(Attack(), "codes of extensions", comm)
        assert rw.all_gather([1, b"\x82\xf0"], safe=True) == [[1, b"\x82\xf0"]] * comm.size
    finally:
        copyreg.remove_extension(__name__, "run_code", 0xF0)


def test_nothing_is_made_before_all_is_checked(comm: Comm) -> None:
    rw.register_safe(Stateful)
    assert_refused([Stateful(), Unknown()], "Unknown", comm)
    rw.all_gather(Stateful(), safe=True)
    assert ran == [{"n": 1}] * comm.size
    ran.clear()


def test_works_and_groups_check_too(comm: Comm) -> None:
    alone = rw.new_group([0])
    if rw.get_rank() == 0:
        assert rw.all_gather(1, safe=True, group=alone) == [1]
        with pytest.raises(rw.PayloadTypeError, match="a value of rank 0 has a"):
            rw.broadcast(Unknown(), safe=True, group=alone)
    for call in calls_with(Unknown(), comm, async_op=True):
        with pytest.raises(rw.PayloadTypeError, match=f"a value of rank {comm.size - 1} has a"):
            call().wait()
    assert rw.all_gather(1, safe=True, async_op=True).wait() == [1] * comm.size
    gathered = rw.all_gather(torch.ones(2, requires_grad=True), differentiable=True, safe=True)
    torch.stack(gathered).sum().backward()


def test_groups_without_frames_check_too(comm: Comm) -> None:
    if comm.size == 1:
        pytest.skip("the group has one member")
    with without_frames(comm):
        assert_refused(Unknown(), "Unknown", comm)
        assert rw.all_gather(torch.ones(5000), safe=True)[0].sum() == 5000


def test_ranks_that_differ_in_safe_are_a_mismatch(comm: Comm) -> None:
    if comm.size == 1:
        assert rw.all_gather(1, safe=True) == [1]
    else:
        with pytest.raises(rw.MismatchError, match="safe=True"):
            rw.broadcast(1, safe=rw.get_rank() == 0)
    with pytest.raises(rw.InvalidArgumentError, match="safe"):
        rw.all_gather(1, safe="yes")  # type: ignore[call-overload]


def test_what_can_be_registered(comm: Comm) -> None:
    class Local:
        pass

    with pytest.raises(rw.InvalidArgumentError, match="takes a class, got"):
        rw.register_safe(os.getpid)  # type: ignore[arg-type]
    with pytest.raises(rw.InvalidArgumentError, match="is defined in a function"):
        rw.register_safe(Local)
    assert comm.size
