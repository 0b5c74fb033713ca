"""Checks of a running server's drafting: acceptance, draft length, gain."""

from __future__ import annotations

from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.metrics_text import Scrape
from draftsmith.train.doctor.finding import Finding, fail, ok, warn

# even a draft trained on other text keeps more than this of its first tokens; a misread one does
# not
STRANGE = 0.05
LOW = 0.30  # alpha_0 below which no drafter that reads the target's states pays
RARE = 0.10  # a position kept less often costs a slot of the pass for next to nothing
FEWEST_ROUNDS = 100  # fewer prove too little
COMMON = 0.2  # share of the rounds that draft a position, below which it is a trial of --k auto
CHECK_DRAFT = "run draftsmith doctor --target T --draft D"
FALLBACK_MENDS = {
    "nan": "the draft's weights give NaN: publish or load a sound version; " + CHECK_DRAFT,
    "invalid": "the draft proposes tokens that the target does not have; " + CHECK_DRAFT,
    "raised": "the server's log has the error; --fallback ngram drafts meanwhile",
}


def check_drafting(scrape: Scrape) -> list[Finding]:
    findings = [check_lossless(scrape), *check_fallbacks(scrape), check_swaps(scrape)]
    version = next(
        (name for name, live in scrape.by("draftsmith_draft_version", "version").items() if live),
        "",
    )
    rounds = scrape.total("vllm:spec_decode_num_drafts_total")
    if version == "" and rounds == 0:
        mend = "start it with --draft, --ngram or --suffix"
        return [*findings, warn("drafting.used", "the server drafts nothing", mend)]
    if rounds == 0:
        what = (
            "a drafter is there but drafted nothing: requests ask for k = 0, --k auto found that "
            "drafts do not pay, or it fails"
        )
        return [
            *findings,
            warn(
                "drafting.used",
                what,
                "look at drafting.fallbacks; draftsmith bench --url measures on against off",
            ),
        ]
    findings.append(
        ok(
            "drafting.used",
            f"draft version {version}, {rounds:.0f} rounds with drafts, counted per request",
        )
    )
    return [*findings, check_acceptance(scrape, version), check_depth(scrape), check_payoff(scrape)]


def check_lossless(scrape: Scrape) -> Finding:
    if scrape.total("draftsmith_lossless") == 1:
        return ok("drafting.lossless", "answers have the target's distribution")
    what = "typical or synthetic acceptance changes the target's distribution"
    return warn(
        "drafting.lossless",
        what,
        "serve with --verification chain or block and without --synthetic-acceptance",
    )


def check_fallbacks(scrape: Scrape) -> list[Finding]:
    """One finding per cause of rounds whose drafts were dropped."""
    causes = {
        cause: count
        for cause, count in scrape.by("draftsmith_fallbacks_total", "cause").items()
        if count > 0
    }
    if not causes:
        return [ok("drafting.fallbacks", "the drafter never failed")]
    rounds = scrape.total("draftsmith_rounds_total")
    return [
        warn(
            f"drafting.fallbacks.{cause}",
            f"{count:.0f} of {rounds:.0f} rounds lost their drafts",
            FALLBACK_MENDS.get(cause, CHECK_DRAFT),
        )
        for cause, count in causes.items()
    ]


def check_swaps(scrape: Scrape) -> Finding:
    swapped, refused = (
        scrape.total("draftsmith_swaps_total"),
        scrape.total("draftsmith_swaps_refused_total"),
    )
    what = f"{swapped:.0f} draft versions swapped in, {refused:.0f} refused"
    if refused == 0:
        return ok("drafting.swaps", what)
    mend = (
        "the server's log has the reason; run draftsmith doctor --target T --draft "
        "VERSIONS/vNNNNNN on the version named by `current`"
    )
    return warn("drafting.swaps", what, mend)


def check_acceptance(scrape: Scrape, version: str) -> Finding:
    """alpha_i and tau of the served version, by the project's one definition."""
    reached, accepted = (
        by_position(scrape, f"draftsmith_{name}_total", draft_version=version)
        for name in ("reached", "accepted")
    )
    rounds = scrape.total("draftsmith_drafting_rounds_total", draft_version=version)
    if rounds < FEWEST_ROUNDS:
        what = f"only {rounds:.0f} rounds of draft version {version}"
        return warn("drafting.acceptance", what, "ask again after more traffic")
    counts = AcceptanceCounts(reached, accepted)
    alpha = ", ".join("-" if rate is None else f"{rate:.2f}" for rate in counts.alpha)
    first = counts.alpha_intervals[0]
    tau = scrape.total("draftsmith_committed_total", draft_version=version) / rounds
    what = (
        f"tau {tau:.2f}, alpha by position {alpha}; the first within [{first.low:.2f}, "
        f"{first.high:.2f}]"
    )
    if first.high < STRANGE:
        mend = f"taps, vocabulary or layout of this draft do not fit this target: {CHECK_DRAFT}"
        return fail("drafting.acceptance", what, mend)
    if first.high < LOW:
        mend = (
            "train on text like the traffic (draftsmith train, or serve --learn and distill), or "
            "try --ngram or --suffix"
        )
        return warn("drafting.acceptance", what, mend)
    return ok("drafting.acceptance", what)


def check_depth(scrape: Scrape) -> Finding:
    """Compares k with the positions that are kept, over all drafts, earlier versions included."""
    offered = by_position(scrape, "draftsmith_offered_total")
    kept = by_position(scrape, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    common = [
        position for position, count in enumerate(offered) if count >= max(COMMON * offered[0], 1)
    ]
    shares = [kept[position] / offered[position] for position in common]
    what = "drafted tokens kept by position: " + ", ".join(f"{share:.0%}" for share in shares)
    rare = next((position for position in common[1:] if shares[position] < RARE), None)
    if rare is None or offered[0] < FEWEST_ROUNDS:
        return ok("drafting.depth", what)
    return warn("drafting.depth", what, f"serve with --k {rare} or --k auto")


def check_payoff(scrape: Scrape) -> Finding:
    """Tokens per pass against the time that drafting takes.

    Without drafts the same tokens need so many times as many passes, none of which takes longer
    than one that also verifies drafts. So this product is the most that drafting can have gained;
    below 1 it surely costs.
    """
    time_s = scrape.by("draftsmith_time_seconds_total", "phase")
    whole_s, passes = sum(time_s.values()), scrape.total("draftsmith_class_target_passes_total")
    if whole_s == 0 or passes == 0:
        return warn("drafting.payoff", "no request has ended yet", "ask again after more traffic")
    per_pass = scrape.total("draftsmith_class_generation_tokens_total") / passes
    most = per_pass * (1 - time_s.get("draft", 0.0) / whole_s)
    split = ", ".join(f"{phase} {spent_s / whole_s:.0%}" for phase, spent_s in time_s.items())
    what = (
        f"{per_pass:.2f} tokens per pass; time of rounds: {split}; at best {most:.2f} times the "
        "speed without drafts"
    )
    if most >= 1:
        return ok("drafting.payoff", what)
    mend = (
        "drafting costs more than it gains: --k auto, a smaller draft, --ngram or --suffix; "
        "draftsmith bench --url measures"
    )
    return warn("drafting.payoff", what, mend)


def by_position(scrape: Scrape, name: str, **labels: str) -> list[int]:
    """[K] counts."""
    counts = {
        int(position): int(count)
        for position, count in scrape.by(name, "position", **labels).items()
    }
    return [counts.get(position, 0) for position in range(max(counts, default=-1) + 1)]
