"""Opening of a target: in this process, in shares of several, or on a server."""

from __future__ import annotations

import torch

from draftsmith.drafters.remote.target import load_remote
from draftsmith.drafters.target.device import device_of, load_target
from draftsmith.drafters.target.target import Target


def load_here_or_served(
    path: str,
    server: str | None,
    *,
    dtype: str = "auto",
    kept: torch.dtype | None = None,
    device: str | None = None,
    max_length: int | None = None,
    shares: int = 1,
    offload: str | None = None,
    trust_remote_code: bool,
) -> Target:
    """The target of the server at the URL `server`, or without one as `load_target` has it.
    `dtype` is its precision as served, for many rows; `kept` that of the weights which are held
    here, of a target that is not int8. Raises `UserError`, and `NoStates` for a server that gives
    none."""
    if server is not None:
        return load_remote(
            path,
            server,
            served_as=dtype,
            dtype=kept,
            device=device_of(device),
            max_length=max_length,
            trust_remote_code=trust_remote_code,
        )
    return load_target(
        path,
        dtype=dtype if kept is None or dtype == "int8" else kept,
        device=device,
        max_length=max_length,
        shares=shares,
        offload=offload,
        use="step",
        trust_remote_code=trust_remote_code,
    )
