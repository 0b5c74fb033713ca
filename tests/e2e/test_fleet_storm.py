"""The storm of `tests/integration/test_fleet_storm.py` with versions and records in a bucket of
moto's S3 server, whose port is shut now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.fleet import places
from tests.integration.test_fleet_storm import check_storm

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def test_a_storm_over_a_bucket(tmp_path: Path) -> None:
    with places.place_of("s3", tmp_path) as place:
        check_storm(tmp_path, place)
