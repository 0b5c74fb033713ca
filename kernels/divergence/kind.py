"""Divergence that a draft is trained by, as a value: a name and, for some, one parameter.
Torch-free."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from draftsmith.errors import UserError


class DivergenceParameter(NamedTuple):
    name: str
    default: float
    low: float  # exclusive
    high: float  # exclusive


# Every divergence, with its parameter where it has one. p is the target's distribution, q the
# draft's.
PARAMETERS: dict[str, DivergenceParameter | None] = {
    "forward-kl": None,
    "reverse-kl": None,
    # weight of p in the mixture; towards 0 forward KL, towards 1 reverse KL
    "jsd": DivergenceParameter("beta", 0.5, 0.0, 1.0),
    "tv": None,
    "tvd++": None,
    "lk-alpha": None,
    # the share of KL is exp(-decay * alpha)
    "lk-hybrid": DivergenceParameter("decay", 3.0, 0.0, float("inf")),
    "ce": None,
}


class DivergenceKind(NamedTuple):
    """Made by `kind_of`."""

    name: str  # a key of PARAMETERS
    parameter: float = 0.0  # 0 where the divergence has none

    @property
    def metric(self) -> str:
        """The name as a key of a metrics file: tvd++ -> tvd_plus_plus."""
        return self.name.replace("++", "-plus-plus").replace("-", "_")


FORWARD_KL = DivergenceKind("forward-kl")


def kind_of(text: str) -> DivergenceKind:
    """`"jsd:0.3"` -> Kind("jsd", 0.3); a name alone takes the default of its parameter."""
    name, colon, given = text.partition(":")
    if name not in PARAMETERS:
        near = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.4)
        mend = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(PARAMETERS)}"
        raise UserError(f"divergence is {text!r}, which is none; {mend}")
    parameter = PARAMETERS[name]
    if parameter is None:
        if colon:
            raise UserError(f"divergence is {text!r} but {name} has no parameter; write {name!r}")
        return DivergenceKind(name)
    return DivergenceKind(name, _number(text, given, parameter) if colon else parameter.default)


def _number(text: str, given: str, parameter: DivergenceParameter) -> float:
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not parameter.low < value < parameter.high:
        raise UserError(
            f"divergence is {text!r} and {parameter.name} must lie between {parameter.low:g} and "
            f"{parameter.high:g}; "
            f"the usual value is {parameter.default:g}"
        )
    return value


DIVERGENCE_HELP = "what is minimised: " + ", ".join(
    name if parameter is None else f"{name}[:{parameter.name}]"
    for name, parameter in PARAMETERS.items()
)
