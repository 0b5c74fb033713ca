"""Numbers by which shares of named things are chosen: held-out texts, canaries, recorded requests.
Torch-free."""

from __future__ import annotations

import hashlib


def uniform(name: str | bytes, draw: str = "") -> float:
    """Number in [0, 1), a function of the name, the same on every machine. Numbers of one name for
    two draws are independent."""
    content = name.encode() if isinstance(name, str) else name
    salted = f"{draw}: ".encode() + content if draw else content
    return int.from_bytes(hashlib.sha256(salted).digest()[:6], "big") / 2**48
