"""Comparison of a server's target with the model that a folder or Hub id describes."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.drafters.remote.connection import Connection
from draftsmith.drafters.remote.messages import DTYPES, FORMAT
from draftsmith.drafters.remote.revision import parameters_in
from draftsmith.drafters.remote.service import plain_config
from draftsmith.drafters.target.target import digest_of
from draftsmith.errors import UserError

# Entries of a configuration that loading and serving change.
OWN_ENTRIES = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "rope_parameters",
    "rope_scaling", "quantization_config", "architectures", "text_config",
)  # fmt: skip

# Entries of a description that a client reads.
ENTRIES: dict[str, type | UnionType] = {
    "revision": str, "loaded_revision": str, "same_as": str | None, "dtype": str,
    "states_dtype": str, "has_long_factors": bool, "hidden_size": int, "vocab_size": int,
    "num_layers": int, "max_positions": int, "pass_bytes": int, "tokenizer_hash": str,
    "config": dict, "max_tokens": int,
}  # fmt: skip


def check_description(connection: Connection, there: dict[str, Any], served_as: str) -> None:
    if there.get("format") != FORMAT:
        raise UserError(
            f"target server {connection.base} answers in format {there.get('format')!r} and this "
            f"draftsmith reads {FORMAT}; use one version on both"
        )
    for name, kind in ENTRIES.items():
        value = there.get(name)
        if not isinstance(value, kind) or (name == "states_dtype" and value not in DTYPES):
            raise UserError(
                f"target server {connection.base} describes its target with {name} = {value!r}; "
                "use one version of draftsmith on both"
            )
    if served_as not in ("auto", there["dtype"]):
        raise UserError(
            f"target server {connection.base} serves in {there['dtype']} and dtype is "
            f"{served_as!r}; leave dtype out, or start the server with it"
        )


def check_config(
    config: PreTrainedConfig, there: dict[str, Any], base: str, path: str | Path
) -> None:
    own = plain_config(config)
    for name in sorted(own.keys() & there["config"].keys()):
        if name in OWN_ENTRIES or name.startswith("_"):
            continue
        if own[name] != there["config"][name]:
            raise other_model(
                base, path, f"its {name} is {there['config'][name]!r}, not {own[name]!r}"
            )


def check_weights(
    path: str | Path, model: PreTrainedModel, there: dict[str, Any], base: str
) -> None:
    """Compares with the weights of a local folder, where it has any."""
    if not any(Path(path).glob("*.safetensors")) or (Path(path) / "adapter_config.json").is_file():
        return
    parameters = parameters_in(Path(path), model)
    known = {there["loaded_revision"].removesuffix("-long"), there["same_as"]}
    if parameters is not None and digest_of(parameters) not in known:
        raise other_model(base, path, "its weights are others")


def other_model(base: str, path: str | Path, why: str) -> UserError:
    return UserError(
        f"target server {base} serves another model than {str(path)!r} ({why}); give --target the "
        "model that it serves"
    )
