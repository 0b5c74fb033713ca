"""A target with the text of a small one and the price of a large one; `scripts/pad_target --help`.

The units added to every MLP are random, as those of a new model, and their columns of the
down-projection are zero: what they compute is multiplied by zero, whatever it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.target.load import build_model, load_model, load_tokenizer
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.drafters.target.target import SAME_AS, revision_of
from draftsmith.errors import UserError
from draftsmith.files import atomic_folder, write_json, write_text

MULTIPLE = 64  # of the added units, for the sake of matrix products
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.jinja")  # fmt: skip
CHECKED_TOKENS = 96


def pad(source: PreTrainedModel, parameters: int, *, seed: int = 0) -> PreTrainedModel:
    """A model of about `parameters` parameters with the logits of `source`, in its dtype. Raises
    `UserError` where MLPs are not pairs of plain layers in and out of `intermediate_size` units."""
    config = copy.deepcopy(source.config)
    width, added = config.intermediate_size, added_units(source, parameters)
    config.intermediate_size = width + added
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        padded = build_model(config, trust_remote_code=False, dtype=source.dtype).eval()
    ours, old = padded.state_dict(), source.state_dict()
    with torch.no_grad():
        for name, weight in old.items():
            into = ours[name]
            if into.shape == weight.shape:
                into.copy_(weight)
            elif into.ndim == 2 and into.shape == (weight.shape[0], width + added):
                into[:, :width] = weight
                into[:, width:] = 0
            elif into.shape == (width + added, *weight.shape[1:]):
                into[:width] = weight
            else:
                raise UserError(
                    f"weight {name!r} is {tuple(weight.shape)} and would become "
                    f"{tuple(into.shape)}, which is no row or column of an MLP; pad another model"
                )
    return padded


def added_units(source: PreTrainedModel, parameters: int) -> int:
    """Units of each MLP that bring the model nearest to `parameters`."""
    per_unit = sum(weight.numel() // width_of(source) for weight in unit_weights(source))
    have = sum(weight.numel() for weight in source.parameters())
    added = round((parameters - have) / per_unit / MULTIPLE) * MULTIPLE
    if added <= 0:
        raise UserError(
            f"the source has {have:,} parameters and is to have {parameters:,}; give at least "
            f"{have + MULTIPLE * per_unit:,}"
        )
    return added


def width_of(source: PreTrainedModel) -> int:
    width = getattr(source.config, "intermediate_size", None)
    if not isinstance(width, int):
        raise UserError(
            f"{source.config.model_type!r} has no single intermediate_size; pad a dense model"
        )
    return width


def unit_weights(source: PreTrainedModel) -> list[torch.Tensor]:
    """Weights of every layer's MLP that grow with its width."""
    body = getattr(source, body_name(source))
    found = []
    for index, layer in enumerate(decoder_layers(body, source.config.num_hidden_layers)):
        mlp = getattr(layer, "mlp", None)
        weights = (
            [] if mlp is None else [w for w in mlp.parameters() if width_of(source) in w.shape]
        )
        if len(weights) < 2:
            raise UserError(
                f"layer {index} has no MLP of {width_of(source)} units; pad a dense model"
            )
        found += weights
    return found


def check_same(source: PreTrainedModel, padded: PreTrainedModel, ids: torch.Tensor) -> float:
    """Compares both in float32 over `ids` [B, L]: logits to the bit with every product of the
    padded model summed in pieces of the source's width, since another order of the same sum rounds
    differently; and the greedy tokens of plain passes. Returns the largest difference of plain
    logits. Raises `UserError`."""
    source, padded = (copy.deepcopy(model).float() for model in (source, padded))
    with torch.inference_mode():
        expected = source(input_ids=ids).logits
        with summed_by(source.config.intermediate_size, padded.config.intermediate_size):
            in_pieces = padded(input_ids=ids).logits
        plain = padded(input_ids=ids).logits
    if not torch.equal(in_pieces, expected):
        raise UserError(
            "the padded model's logits are not the source's to the bit; this architecture cannot "
            "be padded"
        )
    decided = expected.topk(2).values.diff(dim=-1).abs()[..., 0] > 1e-4
    if not torch.equal(plain.argmax(-1)[decided], expected.argmax(-1)[decided]):
        raise UserError("the padded model's greedy tokens are not the source's")
    return (plain - expected).abs().max().item()


@contextmanager
def summed_by(width: int, total: int) -> Iterator[None]:
    """Products with `total` units run as products with `width` of them at a time."""

    def pieces(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.shape[1] == total:
            first, *rest = (
                linear(
                    rows[..., at : at + width].contiguous(), weight[:, at : at + width].contiguous()
                )
                for at in range(0, total, width)
            )
            result = sum(rest, start=first)
            return result if bias is None else result + bias
        if weight.shape[0] == total:
            biases = [None] * total if bias is None else bias.split(width)
            return torch.cat(
                [linear(rows, part, one) for part, one in zip(weight.split(width), biases)], -1
            )
        return linear(rows, weight, bias)

    with patch("torch.nn.functional.linear", pieces):
        yield


def save(
    padded: PreTrainedModel, source: PreTrainedModel, folder: Path, out: Path, difference: float
) -> dict[str, Any]:
    """Writes the checkpoint, the source's tokenizer, what the model is in `config.json` and a model
    card."""
    record = {
        "source": folder.name,
        "source_revision": revision_of(source),
        "source_parameters": count(source),
        "parameters": count(padded),
        "intermediate_size": [source.config.intermediate_size, padded.config.intermediate_size],
        "largest_difference_of_plain_float32_logits": difference,
    }
    with atomic_folder(out) as temporary:
        padded.save_pretrained(temporary)
        for pattern in TOKENIZER_FILES:
            for file in folder.glob(pattern):
                shutil.copy(file, temporary)
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        write_json(
            temporary / "config.json",
            config | {SAME_AS: record["source_revision"], "padded": record},
        )
        write_text(temporary / "README.md", card(record))
    return record


def card(record: dict[str, Any]) -> str:
    return f"""# {record["source"]}, padded

{record["parameters"]:,} parameters with the text of a model of {record["source_parameters"]:,} ({record["source"]},
revision {record["source_revision"]}). Every MLP has {record["intermediate_size"][1]:,} units in place of {record["intermediate_size"][0]:,};
the added ones are random and their columns of the down-projection are zero, so that they cost what
units cost and change no logit. For measuring speed only: it is no better than its source.

Checked when it was made: float32 logits equal to the source's to the bit, each product summed in
pieces of the source's width. Summed in one piece they differ by rounding,
{record["largest_difference_of_plain_float32_logits"]:.1e} at most.

Made by `scripts/pad_target`.
"""


def count(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())


def number(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 100M or 400M")
    return round(float(found[1]) * UNITS[found[2]])


def target_of(run: Path, parameters: str | None) -> Path:
    """The target of a quickstart's folder, or that target padded, which is kept in the folder.

    Args:
        parameters: as `number` reads them; None pads nothing.
    """
    if parameters is None:
        return run / "target"
    padded = run / f"padded-{parameters}"
    if not padded.exists():
        print(f"padding the target to {parameters} parameters", flush=True)
        make(run / "target", padded, number(parameters))
    return padded


def make(folder: Path, out: Path, parameters: int) -> dict[str, Any]:
    """Pads the checkpoint in `folder`, checks the result and writes it to `out`. Raises
    `UserError`."""
    source = load_model(folder, trust_remote_code=False)
    padded = pad(source, parameters)
    difference = check_same(source, padded, checked_ids(source))
    load_tokenizer(folder, trust_remote_code=False)
    return save(padded, source, folder.resolve(), out, difference)


def checked_ids(source: PreTrainedModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab_size = source.get_input_embeddings().weight.shape[0]
    return torch.randint(vocab_size, (2, CHECKED_TOKENS), generator=generator)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/pad_target", description="The text of a small target at a large one's price."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of the source")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--parameters", type=number, default=number("100M"), help="100M, 400M, ... (default: 100M)"
    )
    chosen = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        record = make(chosen.checkpoint, chosen.out, chosen.parameters)
    except UserError as error:
        parser.exit(2, f"pad_target: {error}\n")
    print(
        f"{chosen.out}: {record['parameters']:,} parameters, the text of "
        f"{record['source_parameters']:,}; float32 logits equal to the bit"
    )


if __name__ == "__main__":
    main()
