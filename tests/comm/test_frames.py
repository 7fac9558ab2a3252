"""The bytes of what ranks send each other, compared with recorded ones: `tests/data/frames.txt`.

Ranks that encode something otherwise than the others read something else in it. So the bytes change only together with
a decision to change the protocol: `python -m tests.comm.test_frames` records them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

import numpy as np
import torch

import rankwise as rw
from rankwise._collectives.serialization import serialize
from rankwise._comm.control.calls import Calls, decode_calls, encode_calls, merged
from rankwise._comm.control.protocol import Description, Details, Frame, FrameKind, WaitingInOtherGroup, decode_frame
from rankwise._comm.control.verdict import Outcome, Verdict
from tests.recorded import assert_recorded, record

TABLE = "frames.txt"
PROTOCOL_4, PROTOCOL_5 = b"\x80\x04", b"\x80\x05"
SITE = "train.py:88"
CALLS = {
    "a barrier": Description("barrier", site=SITE),
    "a barrier with a name": Description("barrier", {"name": "epoch 1"}, site=SITE),
    "a reduction": Description("all_reduce", {"op": "sum", "differentiable": True}, "float32[3] 2", site=SITE),
    "a call in a thread": Description("all_gather", {"dst": 3}, site=SITE, main=False),
}
FAILURE = rw.RemoteRankError(rank=3, host="node", raised="ValueError: no data", traceback="trace\n")
REPORTS = {
    "a failure": (FrameKind.FAILED, FAILURE),
    "details": (FrameKind.DETAILS, Details("all_reduce(op='sum')", SITE, {"loss": "float32[3]"}, None)),
    "a wait in another group": (FrameKind.WAITING_IN_OTHER_GROUP, WaitingInOtherGroup(2, "barrier", 5, range(2, 6), 9)),
    "an error that ends an exchange": (FrameKind.ENDED, rw.CollectiveTimeoutError("rank 1 did not come")),
}
VERDICTS = {
    "agreement": Verdict(Outcome.AGREED, b"the result"),
    "difference": Verdict(Outcome.DIFFERENT),
    "error": Verdict(
        Outcome.ERROR,
        error=rw.MismatchError("the calls differ"),
        waiting=[WaitingInOtherGroup(0, "barrier", 5, (0,), 1)],
    ),
}
VALUES = {
    "None": None,
    "a bool": True,
    "an integer": -(1 << 70),
    "a float": 0.1,
    "a complex number": 1j,
    "a text": "Größe",
    "bytes": b"\0\xff",
    "containers": {"a": [1, (2.5, None)], 3: {"b"}},
    "a tensor of bfloat16": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
    "a tensor of int64": torch.arange(3),
    "an array": np.array([1, 2], dtype=np.int16),
}


def encoded(frame: Frame) -> bytes:
    """Return the bytes of a frame of the seventh exchange of group 5."""
    frame.group, frame.sequence = 5, 7
    return frame.encode()


def frames() -> Mapping[str, bytes]:
    found = {f"call: {name}": encoded(call.frame(body=b"body")) for name, call in CALLS.items()}
    for name, (kind, report) in REPORTS.items():
        found[f"report: {name}"] = encoded(Frame(kind, "", body=pickle.dumps(report, protocol=4)))
    found["rank that leaves"] = encoded(Frame(FrameKind.LEFT, "", body=b"it has left the session"))
    found["members that wait"] = encoded(Frame(FrameKind.WAITING, f"barrier at {SITE}", bytes(range(16))))
    calls = [Calls.of(member, CALLS["a barrier"].frame(body=b"same")) for member in (0, 1, 70_000)]
    calls += [Calls.of(member, CALLS["a reduction"].frame(body=bytes(member))) for member in (2, 3)]
    found["calls of members"] = encoded(Frame(FrameKind.CALLS, "", body=encode_calls(merged(calls))))
    return found


def table() -> Iterator[str]:
    """Return the table."""
    for name, data in frames().items():
        yield f"{name}: {data!r}"
    for name, verdict in VERDICTS.items():
        # Python 3.14 has a newer protocol of pickles by default, with the same bytes.
        yield f"verdict: {name}: {verdict.encode().replace(PROTOCOL_5, PROTOCOL_4)!r}"
    for name, value in VALUES.items():
        header = serialize(value).header
        parts = [part.replace(PROTOCOL_5, PROTOCOL_4) for part in (header.table, header.pickled, header.inline)]
        yield f"value: {name}: {dict(header.sizes)} {' '.join(map(repr, parts))}"


def test_what_is_sent_are_the_recorded_bytes() -> None:
    assert_recorded(TABLE, table(), "tests.comm.test_frames")


def test_what_is_received_is_what_was_sent() -> None:
    for data in frames().values():
        frame, start, length = decode_frame(data)
        frame.body = data[start:]
        assert length == len(frame.body)
        assert frame.encode() == data
        if frame.kind is FrameKind.CALLS:
            assert encode_calls(decode_calls(frame.body)) == frame.body
    for verdict in VERDICTS.values():
        assert Verdict.decode(verdict.encode()).encode() == verdict.encode()


if __name__ == "__main__":
    record(TABLE, table())
