"""Compiles the divergence kernel's variants for a Hopper GPU and prints how many; run by
test_compile.py."""

from __future__ import annotations

import itertools

from compile_kernels import F32, I64, check

from draftsmith.kernels.divergence import rows_triton as divergence_triton

ROWS = {
    "weights": F32,
    "losses": F32,
    "alphas": F32,
    "keeps": F32,
    "outsides": F32,
    "parameter": "fp32",
}


def main() -> int:
    done = 0
    for name, code in divergence_triton.CODES.items():
        # Every kind with one layout, every layout with one kind.
        for has_map, has_columns in (
            itertools.product((True, False), repeat=2) if name == "jsd" else [(True, True)]
        ):
            pointers = {
                **ROWS,
                "draft_logits": "*bf16",
                "target_logits": "*bf16",
                "vocab_map": I64 if has_map else F32,
                "columns": I64 if has_columns else F32,
            }
            held_against = name in divergence_triton.HELD_AGAINST
            constants = {
                "KIND": code,
                "HAS_REF": held_against,
                "HAS_MAP": has_map,
                "HAS_COLUMNS": has_columns,
                "BLOCK": 4096,
            }
            done += check(divergence_triton._divergence_rows, pointers, constants)
    return done


if __name__ == "__main__":
    print(main())
