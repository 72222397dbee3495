"""Figures of the paper's tables that an evaluation is shown beside: SD3-Medium, 1024 x 1024, 50 steps, RTX 4090."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shiva.bench.table import Table


class PaperRow(NamedTuple):
    """A row of table main_results."""

    fid: float
    image_reward: float
    clip: float
    iqa: float
    tflops: float
    """In the paper's convention."""
    latency: float
    """Milliseconds of an image."""
    speedup: float
    saved: float
    """Per cent of dense FLOPs."""


MAIN = {
    "Vanilla": PaperRow(16.86, 0.9385, 30.89, 0.4567, 11.80, 7659.9, 1.00, 0.0),
    "Finetuned": PaperRow(13.22, 1.0179, 31.18, 0.4743, 11.80, 7659.9, 1.00, 0.0),
    "ToMeSD": PaperRow(40.22, 0.6727, 30.88, 0.4632, 8.98, 7352.9, 1.04, 23.9),
    "ToFu": PaperRow(47.43, 0.4157, 30.36, 0.4655, 8.98, 7296.7, 1.05, 23.9),
    "SDTM": PaperRow(47.08, 0.3257, 29.96, 0.4705, 8.83, 7180.6, 1.07, 25.2),
    "ToMA": PaperRow(30.06, 0.7033, 30.83, 0.4633, 8.23, 7406.5, 1.03, 30.3),
    "IBTM": PaperRow(19.96, 0.8610, 30.88, 0.4695, 10.18, 7526.6, 1.02, 13.7),
    "NeuralSort": PaperRow(22.78, 0.8379, 30.78, 0.4764, 9.47, 6377.3, 1.20, 19.7),
    "DiffCR": PaperRow(17.51, 0.7884, 30.81, 0.4941, 9.93, 6709.8, 1.14, 15.8),
    "DyDiT": PaperRow(15.29, 0.7844, 30.65, 0.4824, 9.42, 6553.9, 1.17, 20.2),
    "SparseDiT": PaperRow(25.71, 0.7751, 30.56, 0.4795, 8.95, 6211.3, 1.24, 24.2),
    "Shiva-90%": PaperRow(12.15, 0.9228, 31.26, 0.4959, 10.19, 6996.2, 1.09, 13.6),
    "Shiva-80%": PaperRow(13.83, 0.8915, 31.10, 0.5051, 8.92, 6112.6, 1.25, 24.4),
    "Shiva-70%": PaperRow(15.74, 0.9466, 31.16, 0.4871, 7.38, 5603.5, 1.37, 37.5),
    "Shiva-60%": PaperRow(16.42, 0.9974, 31.35, 0.4952, 6.96, 4989.0, 1.54, 41.0),
}
BASELINES = ("ToMeSD", "ToFu", "SDTM", "ToMA", "IBTM", "NeuralSort", "DiffCR", "DyDiT", "SparseDiT")
BENCHED = {
    "dense": MAIN["Vanilla"],
    **{f"shiva {keep}": MAIN[f"Shiva-{keep:.0%}"] for keep in (0.9, 0.8, 0.7, 0.6)},
    **{name.lower(): MAIN[name] for name in BASELINES},
}
"""Rows by the names that `shiva bench` has for them."""

CATEGORIES = {
    "logo": (207, -0.708, 0.025, -0.073),
    "art": (195, 0.358, 0.035, 0.029),
    "plants": (195, 0.399, 0.048, 0.026),
    "fashion": (210, 0.430, 0.046, 0.077),
    "food": (196, 0.578, 0.034, 0.126),
    "vehicles": (205, 0.686, 0.050, 0.083),
    "people": (217, 0.789, 0.047, 0.062),
    "animals": (187, 0.860, 0.055, 0.116),
    "landscape": (185, 0.890, 0.035, 0.088),
    "indoor": (203, 0.979, 0.028, 0.151),
    "all": (2000, 0.520, 0.040, 0.068),
}
"""Table percat, Shiva-60 minus Vanilla: images, and the differences of CLIP, CLIP-IQA and ImageReward."""

SEEDS = ((-0.741, 0.081), (-0.813, 0.052), (-0.743, 0.033), (-1.360, 0.045), (-0.919, 0.077))
"""Table multiseed, Shiva-90 minus Finetuned at seeds 0 to 4: FID and CLIP."""


def quoted(
    title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str = "", names: int = 1
) -> Table:
    """A table of the paper's figures: every heading says so, but those of the columns that name a row."""
    marked = (*columns[:names], *(f"paper: {column}" for column in columns[names:]))
    return Table(f"The paper's: {title}", marked, rows, caption)


def main_table(names: Sequence[str]) -> Table:
    """The paper's figures for rows that an evaluation has too; saved FLOPs and speed-up stand beside our own."""
    rows = [
        (
            name,
            f"{row.fid:.2f}",
            f"{row.image_reward:.4f}",
            f"{row.clip:.2f}",
            f"{row.iqa:.4f}",
            f"{row.tflops:.2f}",
            f"{row.latency:.1f}",
        )
        for name, row in MAIN.items()
        if name in names
    ]
    return quoted(
        "SD3-Medium on MJHQ-30K (table main_results)",
        ("method", "FID ↓", "ImageReward ↑", "CLIP ↑", "CLIP-IQA ↑", "TFLOPs, MACs counted once", "latency, ms"),
        rows,
        "another model and other metrics: only order and sign can be compared",
    )


def seeds_table() -> Table:
    rows = [(str(seed), f"{fid:+.3f}", f"{clip:+.3f}") for seed, (fid, clip) in enumerate(SEEDS)]
    return quoted("Shiva-90 minus Finetuned (table multiseed)", ("seed", "ΔFID ↓", "ΔCLIP ↑"), rows)


def categories_table() -> Table:
    rows = [(name, str(n), f"{c:+.3f}", f"{q:+.3f}", f"{r:+.3f}") for name, (n, c, q, r) in CATEGORIES.items()]
    columns = ("category", "n", "ΔCLIP ↑", "ΔCLIP-IQA ↑", "ΔImageReward ↑")
    return quoted("Shiva-60 minus Vanilla (table percat)", columns, rows)


def transfer_table() -> Table:
    rows = [("Shiva-60 shifted to 79 %", "+0.96", "-0.04", "+0.29")]
    columns = ("minus Shiva-80", "ΔCLIP ↑", "ΔCLIP-IQA ↑", "ΔImageReward ↑")
    return quoted("transfer minus direct training (app. Budget Transfer)", columns, rows)


def generalization_table() -> Table:
    rows = [
        ("512 x 512", "Vanilla", "19.02", "0.840", "30.654", "0.423"),
        ("512 x 512", "ToMeSD", "36.42", "0.468", "30.314", "0.400"),
        ("512 x 512", "DiffCR", "26.83", "0.627", "30.245", "0.413"),
        ("512 x 512", "DyDiT", "26.53", "0.662", "30.059", "0.444"),
        ("512 x 512", "Shiva-80%", "17.05", "0.733", "30.812", "0.452"),
        ("512 x 512", "Shiva-60%", "19.32", "0.716", "30.860", "0.454"),
        ("1024 x 768", "Vanilla", "16.21", "0.933", "30.796", "0.456"),
        ("1024 x 768", "ToMeSD", "39.73", "0.646", "30.717", "0.461"),
        ("1024 x 768", "DiffCR", "32.18", "0.747", "30.585", "0.482"),
        ("1024 x 768", "DyDiT", "16.13", "0.665", "30.453", "0.478"),
        ("1024 x 768", "Shiva-80%", "13.75", "0.877", "31.008", "0.495"),
        ("1024 x 768", "Shiva-60%", "16.55", "0.954", "31.220", "0.483"),
        ("DrawBench", "Vanilla", "", "0.980", "34.126", "0.459"),
        ("DrawBench", "ToMeSD", "", "0.830", "33.778", "0.471"),
        ("DrawBench", "DiffCR", "", "0.832", "32.598", "0.477"),
        ("DrawBench", "DyDiT", "", "0.615", "32.210", "0.484"),
        ("DrawBench", "Shiva-80%", "", "0.875", "33.569", "0.496"),
        ("DrawBench", "Shiva-60%", "", "0.853", "33.309", "0.487"),
        ("PartiPrompts", "Vanilla", "", "1.182", "33.103", "0.468"),
        ("PartiPrompts", "ToMeSD", "", "0.961", "33.622", "0.466"),
        ("PartiPrompts", "DiffCR", "", "0.971", "32.900", "0.500"),
        ("PartiPrompts", "DyDiT", "", "0.904", "32.907", "0.495"),
        ("PartiPrompts", "Shiva-80%", "", "1.170", "33.232", "0.508"),
        ("PartiPrompts", "Shiva-60%", "", "1.144", "33.246", "0.498"),
    ]
    columns = ("set", "method", "FID ↓", "ImageReward ↑", "CLIP ↑", "CLIP-IQA ↑")
    return quoted("other prompts and resolutions (table generalization)", columns, rows, names=2)


def ratio_table() -> Table:
    rows = [("fixed", "21.76", "0.835", "30.75", "0.497"), ("adaptive", "17.36", "0.880", "30.94", "0.500")]
    columns = ("policy", "FID ↓", "ImageReward ↑", "CLIP ↑", "CLIP-IQA ↑")
    return quoted("fixed against adaptive ratio at 0.6 (table ratio_ablation)", columns, rows)


def int8_table() -> Table:
    rows = [("11 of 24 blocks", "+0.616", "+0.118"), ("22 of 24 blocks", "+2.824", "-0.082")]
    return quoted("Shiva-80 in INT8 minus fp16 (table quant_quality)", ("scope", "ΔFID ↓", "ΔCLIP ↑"), rows)
