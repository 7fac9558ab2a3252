"""Errors and descriptions in the bodies of frames: a rank reads no other pickles there."""

from __future__ import annotations

import copyreg
import functools
import os
import pickle

import pytest

import rankwise as rw
from rankwise._comm.control.exchange import Exchange, Inbox
from rankwise._comm.control.protocol import Details, Frame, FrameKind, WaitingInOtherGroup, read_report
from rankwise._comm.control.tree import Tree
from rankwise._comm.control.verdict import Verdict

REMOTE = rw.RemoteRankError(rank=1, host="a", raised="ValueError: no data", traceback="here")


@pytest.mark.parametrize(
    "report",
    [
        Details("all_reduce()", "train.py:88", {"x": "float32[3]"}, REMOTE),
        WaitingInOtherGroup(1, "barrier", 7, range(3), 5),
        (rw.MismatchError("the calls differ"), [WaitingInOtherGroup(0, "barrier", 7, [0, 2], 5)]),
        rw.CollectiveTimeoutError("2 ranks are missing"),
    ],
)
def test_reports_come_back(report: object) -> None:
    assert repr(read_report(pickle.dumps(report))) == repr(report)


def test_codes_of_extensions_are_refused() -> None:
    """Python keeps their definitions for all unpicklers, once one has read such a pickle."""
    copyreg.add_extension("os", "getpid", 0xF0)
    try:
        pickle.loads(b"\x80\x05\x82\xf0.")
        with pytest.raises(pickle.UnpicklingError, match="codes of extensions"):
            read_report(b"\x80\x05\x82\xf0)R.")
        assert read_report(pickle.dumps({1: b"\x82\xf0"})) == {1: b"\x82\xf0"}
    finally:
        copyreg.remove_extension("os", "getpid", 0xF0)


@pytest.mark.parametrize("hostile", [functools.partial(os.getpid), os.getpid, rw.init, {1: os.getpid}])
def test_pickles_with_anything_else_are_refused(hostile: object) -> None:
    body = pickle.dumps(hostile)
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in this pickle"):
        read_report(body)
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in this pickle"):
        Verdict.decode(b"\2" + body)
    inbox = Inbox(ends={1: Frame(FrameKind.ENDED, "", body=body)})
    exchange = Exchange(0, 1, ranks=range(2), unit=0, tree=Tree(2), inboxes={1: inbox}, combine=None)
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in this pickle"):
        exchange.step(0.0)
