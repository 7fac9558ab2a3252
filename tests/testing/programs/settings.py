"""Markers that cannot be used."""

from __future__ import annotations

import unittest

import pytest


@pytest.mark.ranks
def test_no_sizes() -> None: ...


@pytest.mark.ranks(0)
def test_no_ranks() -> None: ...


@pytest.mark.ranks("four")
def test_a_word() -> None: ...


@pytest.mark.ranks(2, 2)
def test_a_size_twice() -> None: ...


@pytest.mark.ranks(2, time=3)
def test_another_option() -> None: ...


@pytest.mark.ranks(2, timeout=0)
def test_no_time() -> None: ...


class TestCase(unittest.TestCase):
    @pytest.mark.ranks(1, 2)
    def test_several_sizes(self) -> None: ...


@pytest.mark.ranks("serial", 2, device="nowhere")
def test_no_device() -> None: ...


@pytest.mark.ranks(2, backend="none")
def test_no_backend() -> None: ...


@pytest.mark.ranks("serial", 2, device="meta")
def test_a_device_that_is_not_here() -> None: ...
