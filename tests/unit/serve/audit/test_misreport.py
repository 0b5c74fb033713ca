from __future__ import annotations

import pytest

from draftsmith.errors import UserError
from draftsmith.serve.audit.misreport import Misreport


@pytest.mark.parametrize("text", ["2", "0:3", "2:0", "a:b", "2:inf", ""])
def test_what_is_no_misreport_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="DEPTH:FACTOR"):
        Misreport.parse(text)
