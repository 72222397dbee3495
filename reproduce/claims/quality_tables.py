"""The paper's tables of quality, read from what `shiva eval` measured on an embedded model.

    shiva eval models/emoji --methods recipes/eval/emoji.yaml --limit 64 --record \\
        --protocol main --protocol transfer --protocol ratio --protocol categories --protocol int8 --protocol matched
    shiva eval models/emoji --methods recipes/eval/emoji.yaml --limit 16 --record --protocol seeds --protocol heldout
    python -m reproduce.claims.quality_tables --record

and the same of `models/emoji-128`, with recipes/eval/emoji-128.yaml and `--limit 32` where 64 stands here.

FID is read as the Fréchet distance on EfficientNet-Lite0 features, CLIP as the embedded model's text-image score:
other scales, so signs and orders are compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reproduce.claims.common import FIRST, Claim, Result, judge, main, ordered, weakest
from reproduce.claims.tables import RESULTS, Reading, Tables, beyond, listed, load
from reproduce.paper import BASELINES, MAIN

LARGE = ("main", "transfer", "ratio", "categories")
PROMPTS = {"emoji": 64, "emoji-128": 32}
"""That those were run on, with one seed."""
SMALL = ("seeds", "heldout")
"""On 16 prompts."""
ALSO = {"emoji": ("matched-61.6", "int8"), "emoji-128": ("int8",)}
"""Of the large ones, what was run on some models alone."""
POINTS = {f"Shiva {budget}": MAIN[f"Shiva-{budget}%"].fid for budget in (90, 80, 70, 60)}
"""With the paper's FID."""
HELD_OUT = "held-out prompts"


def sources(model: str) -> list[str]:
    large = [f"{model}-{PROMPTS[model]}/tables/{name}" for name in (*LARGE, *ALSO.get(model, ()))]
    return [*large, *(f"{model}-16/tables/{name}" for name in SMALL)]


def tables(model: str = "emoji") -> Tables:
    return {**load(RESULTS / "eval", sources(model)), "prompts": PROMPTS[model]}


def error(gain: dict[str, float], form: str = "+.3f") -> str:
    return f"{gain['mean']:{form}} ± {gain['error']:{form.lstrip('+')}}"


def pareto(t: Tables) -> Claim:
    quality, cost = t["main"]["quality"], t["main"]["cost"]
    beaten = {
        point: [
            rival
            for rival in BASELINES
            if cost[rival]["share"] <= cost[point]["share"] and quality[rival]["frechet"] < quality[point]["frechet"]
        ]
        for point in POINTS
    }
    on = [point for point, by in beaten.items() if not by]
    behind = "; ".join(
        f"{point} ({quality[point]['frechet']:.1f}) behind {rival} ({quality[rival]['frechet']:.1f})"
        for point, by in beaten.items()
        for rival in by
    )
    return Claim(
        "Shiva's four points lie on the Pareto front of quality and cost",
        "4 of 4 (FID, latency)",
        f"{len(on)} of 4 (Fréchet, true FLOPs): {', '.join(on) or 'none'}" + (f"; {behind}" if behind else ""),
        judge(len(on) == 4, len(on) == 3),
        f"Among the paper's nine others, as trained or preset here; {t['prompts']} prompts, one seed."
        + at_equal_flops(t),
    )


def at_equal_flops(t: Tables) -> str:
    """A sentence on the method that was nearest, where all were brought to Shiva 60's FLOPs."""
    if "matched-61.6" not in t:
        return ""
    verdict = t["matched-61.6"]["verdict"]["IBTM, FFN too at 61.6%"]["metrics"].values()
    ahead, behind = (sum(metric["stands"] == place for metric in verdict) for place in ("ahead", "behind"))
    return f" At its FLOPs Shiva 60 is ahead of IBTM on {ahead} of {len(verdict)} metrics and behind on {behind}."


def below_vanilla(t: Tables) -> Claim:
    quality = t["main"]["quality"]
    found = [quality[point]["frechet"] for point in POINTS]
    return Claim(
        "all four points have a lower FID than the unpruned model",
        f"{listed(list(POINTS.values()), '.2f')} against {MAIN['Vanilla'].fid}",
        f"Fréchet {listed(found, '.0f')} against {quality['dense']['frechet']:.0f}",
        judge(False, max(found) < quality["dense"]["frechet"]),
        "In the paper fine-tuning alone brings FID to 13.22; here, on images that the base model has learned from, "
        f"Fréchet to {quality['fine-tuned']['frechet']:.0f}. {t['prompts']} prompts, one seed.",
    )


def seeds_90(t: Tables) -> Claim:
    pairs = t["seeds"]["paired"]["Shiva 90"]
    fid, clip = pairs["frechet"], pairs["text_image"]
    nothing = [0.0] * fid["count"]
    return Claim(
        "Shiva-90 is ahead of Finetuned in every seed, by FID and by CLIP",
        "5 of 5; ΔFID -0.74 to -1.36, ΔCLIP +0.03 to +0.08",
        f"{sum(d < 0 for d in fid['each'])} and {sum(d > 0 for d in clip['each'])} of {fid['count']}; ΔFréchet "
        f"{fid['mean']:+.0f} ± {fid['deviation']:.0f}, Δtext-image {clip['mean']:+.3f} ± {clip['deviation']:.3f}",
        weakest(ordered(nothing, fid["each"]), ordered(clip["each"], nothing)),
        "16 prompts a seed.",
    )


def seeds_60(t: Tables) -> Claim:
    clip = t["seeds"]["paired"]["Shiva 60"]["text_image"]
    return Claim(
        "Shiva-60 is ahead of Finetuned by CLIP in every seed",
        "5 of 5",
        f"{sum(d > 0 for d in clip['each'])} of {clip['count']}; Δtext-image {clip['mean']:+.3f} ± "
        f"{clip['deviation']:.3f}",
        ordered(clip["each"], [0.0] * clip["count"]),
        "16 prompts a seed.",
    )


def seeds_80(t: Tables) -> Claim:
    fid = t["seeds"]["paired"]["Shiva 80"]["frechet"]
    return Claim(
        "Shiva-80 is behind Finetuned by FID in every seed",
        "ahead in 0 of 5",
        f"ahead in {sum(d < 0 for d in fid['each'])} of {fid['count']}; ΔFréchet {fid['mean']:+.0f} ± "
        f"{fid['deviation']:.0f}",
        ordered(fid["each"], [0.0] * fid["count"]),
        "16 prompts a seed; the paper's control of its test.",
    )


def transfer(t: Tables) -> Claim:
    pairs = t["transfer"]["paired"]["Shiva 60 shifted to 80"]
    return Claim(
        "a table shifted from 60 to 80 is ahead of training at 80 by CLIP",
        "ΔCLIP +0.96, ΔImageReward +0.29, ΔCLIP-IQA -0.04",
        f"Δtext-image {error(pairs['text_image'])}, ΔFréchet {pairs['frechet']['mean']:+.1f}",
        beyond(pairs["text_image"]),
        f"{pairs['text_image']['count']} prompts, one seed. Shifting needs no second training.",
    )


def adaptive_ratio(t: Tables) -> Claim:
    quality, gap = t["ratio"]["quality"], t["ratio"]["paired"]["Shiva 60 fixed"]["text_image"]
    learned, fixed, flat = (quality[f"Shiva 60{kind}"]["frechet"] for kind in ("", " fixed", " flat"))
    return Claim(
        "an adaptive ratio has a lower FID than a fixed one at the same mean",
        "17.36 against 21.76; CLIP 30.94 against 30.75",
        f"Fréchet {learned:.1f} against {fixed:.1f}; fixed minus adaptive, text-image {error(gap, '+.4f')}",
        judge(False, learned < fixed),
        f"One training of each, {gap['count']} prompts, one seed. Under a flat table the adaptive checkpoint itself "
        f"is at {flat:.1f}, so the learned table itself is worth {flat - learned:.1f} (`learned_schedule`).",
    )


def other_sizes(t: Tables) -> Claim:
    names = ("dense", "ToMeSD", "DiffCR", "DyDiT")
    found = {size: by for size, by in t["heldout"].items() if size != HELD_OUT}
    first = next(iter(found))
    ahead = [by["Shiva 80"]["frechet"] < by[name]["frechet"] for by in found.values() for name in names]
    psnr = (t["main"]["quality"], found[first])
    ours, merging = (psnr[0][name]["psnr"] - psnr[1][name]["psnr"] for name in ("Shiva 80", "ToMeSD"))
    shown = (
        f"{by['Shiva 80']['frechet']:.0f} against {listed([by[name]['frechet'] for name in names], '.0f')} at {size}"
        for size, by in found.items()
    )
    return Claim(
        "at other sizes, not trained again, Shiva-80 has a lower FID than Vanilla, ToMeSD, DiffCR and DyDiT",
        "17.05 against 19.02 / 36.42 / 26.83 / 26.53 at 512², 13.75 against 16.21 / 39.73 / 32.18 / 16.13 at 1024 x "
        "768",
        "Fréchet " + ", ".join(shown),
        judge(False, all(ahead)),
        f"Ahead in {sum(ahead)} of {len(ahead)} pairs; 16 prompts, one seed. From the size of training "
        f"({t['prompts']} prompts) to {first} Shiva 80 loses {ours:.1f} dB of PSNR to dense, ToMeSD {merging:.1f}.",
    )


def other_prompts(t: Tables) -> Claim:
    found = t["heldout"][HELD_OUT]
    names = ("ToMeSD", "DiffCR", "DyDiT")
    ours, others = found["Shiva 80"]["text_image"], [found[name]["text_image"] for name in names]
    return Claim(
        "on held-out prompts Shiva-80 is ahead of ToMeSD, DiffCR and DyDiT",
        "ImageReward 0.875 against 0.830 / 0.832 / 0.615 (DrawBench), 1.170 against 0.961 / 0.971 / 0.904 "
        "(PartiPrompts)",
        f"text-image {ours:.3f} against {listed(others, '.3f')}",
        judge(False, ours > max(others)),
        f"16 prompts, one seed, and dense itself is at {found['dense']['text_image']:.3f} and has its label first in "
        f"{found['dense']['top1']:.0%} of them. Fréchet distance: Shiva 80 {found['Shiva 80']['frechet']:.0f}, DyDiT "
        f"{found['DyDiT']['frechet']:.0f}.",
    )


def over_all(t: Tables) -> Claim:
    gain = t["categories"]["paired"]["Shiva 60"]["all categories"]["text_image"]
    return Claim(
        "over all categories Shiva-60 is ahead of Vanilla",
        "ΔCLIP +0.520, ΔCLIP-IQA +0.040, ΔImageReward +0.068",
        f"Δtext-image {error(gain)}",
        beyond(gain),
        f"{gain['count']} prompts, one seed.",
    )


def worst_category(t: Tables) -> Claim:
    pairs = {name: by["text_image"] for name, by in t["categories"]["paired"]["Shiva 60"].items()}
    pairs.pop("all categories")
    worst = sorted(pairs, key=lambda name: pairs[name]["mean"])
    symbols, next_worst = pairs["symbols"], min(pairs[name]["mean"] for name in pairs if name != "symbols")
    counts, errors = ([by[what] for by in pairs.values()] for what in ("count", "error"))
    return Claim(
        "`logo` loses most, and alone falls below Vanilla",
        "ΔCLIP -0.708; the nine others +0.358 to +0.979",
        f"`symbols` {error(symbols)}, place {worst.index('symbols') + 1} of {len(worst)} from the worst; `{worst[0]}` "
        f"{error(pairs[worst[0]])}; below dense: {sum(by['mean'] < 0 for by in pairs.values())}",
        judge(next_worst - symbols["mean"] > 2 * symbols["error"], worst[0] == "symbols"),
        f"{min(counts)} to {max(counts)} prompts a category, with errors of {min(errors):.3f} to {max(errors):.3f}. "
        "Our symbols are signs, not words.",
    )


def int8_cost(t: Tables) -> Claim:
    base, pairs = t["int8"]["quality"]["Shiva 80"]["frechet"], list(t["int8"]["paired"].values())
    costs, allowed = [by["frechet"]["mean"] / base for by in pairs], [0.616 / 13.83, 2.824 / 13.83]
    return Claim(
        "INT8 feed-forward layers cost Shiva-80 little",
        "ΔFID +0.616 / +2.824 of 13.83, ΔCLIP +0.118 / -0.082 (11 / 22 of 24 blocks)",
        f"ΔFréchet {listed([by['frechet']['mean'] for by in pairs], '+.1f')} of {base:.0f}, Δtext-image "
        f"{' / '.join(error(by['text_image'], '+.4f') for by in pairs)} (4 / 7 of 8 blocks)",
        judge(all(c <= a for c, a in zip(costs, allowed, strict=True)), max(costs) <= max(allowed)),
        f"{pairs[0]['text_image']['count']} prompts, one seed: no loss that they can show.",
    )


def int8_scope(t: Tables) -> Claim:
    few, many = (by["frechet"]["mean"] for by in t["int8"]["paired"].values())
    psnr = [by["psnr"] for by in t["int8"]["quality"].values()]
    return Claim(
        "INT8's loss grows with the blocks converted",
        "ΔFID +0.616, then +2.824",
        f"ΔFréchet {few:+.1f}, then {many:+.1f}",
        judge(False, 0 < few < many),
        f"Of a loss too small for {t['prompts']} prompts. PSNR to dense: {listed(psnr, '.2f')} dB from none to most.",
    )


READINGS: tuple[Reading, ...] = (
    pareto,
    below_vanilla,
    seeds_90,
    seeds_60,
    seeds_80,
    transfer,
    adaptive_ratio,
    other_sizes,
    other_prompts,
    over_all,
    worst_category,
    int8_cost,
    int8_scope,
)
ON_INT8 = (int8_cost, int8_scope)


def run(quick: bool = False, model: Path = FIRST) -> Result:
    found = tables(model.name)
    claims = tuple(reading(found) for reading in READINGS if "int8" in found or reading not in ON_INT8)
    read = [f"results/eval/{name}.json" for name in sources(model.name)]
    return Result("quality_tables", "Quality by `shiva eval`", claims, {"read": read})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FIRST, help="whose tables are read")
    main("quality_tables", parser)
