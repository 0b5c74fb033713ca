"""Compiles the variants of paged attention for a Hopper GPU and prints how many; run by
test_compile.py."""

from __future__ import annotations

from typing import Any

import triton
from compile_kernels import F32, I64, check

from draftsmith.kernels.attention import paged_triton as paged

INDICES = ("block_tables", "starts", "positions", "kv_indices", "ancestors", "first")
NUMBERS = {"scale": "fp32", "softcap": "fp32"}


def attend(
    dtype: str,
    dims: tuple[int, int],
    *,
    queries: int,
    splits: int,
    extras: bool,
    tree: bool,
    chunks: bool = False,
) -> int:
    widths = [triton.next_power_of_2(dim) for dim in dims]
    constants: dict[str, Any] = {
        "KV_HEADS": 8, "GROUPS": 4, "KEY_DIM": dims[0], "VALUE_DIM": dims[1], "BLOCK_SIZE": 16,
        "ROWS": 8,
        "TILE": queries // 4, "QUERIES": queries,
        "KEYS": paged._num_keys(sum(widths), 4 if dtype == F32 else 2),
        "KEY_WIDTH": widths[0], "VALUE_WIDTH": widths[1], "SPLITS": splits, "HAS_TREE": tree,
        "HAS_WINDOW": extras or chunks, "HAS_CHUNKS": chunks, "HAS_SOFTCAP": extras, "HAS_SINKS": extras,
    }  # fmt: skip
    pointers = (
        dict.fromkeys(("query", "keys", "values", "sinks"), dtype)
        | dict.fromkeys(INDICES, I64)
        | NUMBERS
    )
    pointers |= {"out": dtype if splits == 1 else F32, "maxima": F32, "sums": F32}
    return check(paged._attend, pointers, constants)


def main() -> int:
    done = 0
    done += attend("*bf16", (128, 128), queries=16, splits=8, extras=False, tree=False)
    done += attend("*bf16", (80, 80), queries=64, splits=1, extras=True, tree=True)
    done += attend("*bf16", (576, 512), queries=16, splits=16, extras=False, tree=True)
    done += attend(F32, (128, 128), queries=32, splits=4, extras=True, tree=False)
    done += attend("*bf16", (128, 128), queries=16, splits=8, extras=False, tree=True, chunks=True)
    pointers = {"parts": F32, "maxima": F32, "sums": F32, "out": "*bf16"}
    done += check(
        paged._merge, pointers, {"VALUE_DIM": 80, "VALUE_WIDTH": 128, "SPLITS": 3, "WIDTH": 4}
    )
    return done


if __name__ == "__main__":
    print(main())
