"""Interpreted steps round as a device does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.interpreted import rounding_to_nearest


@pytest.fixture(scope="package", autouse=True)
def rounded() -> Iterator[None]:
    with nullcontext() if os.environ["TRITON_INTERPRET"] == "0" else rounding_to_nearest():
        yield
