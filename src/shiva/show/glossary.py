"""What the words in an evaluation's tables mean."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from shiva.core.method import MethodConfig

METRICS = {
    "Fréchet": "how far the generated images are from the real ones as a set, on features of EfficientNet-Lite0. "
    "It is not FID and not comparable with it; fewer images give a larger distance, so compare at equal counts.",
    "kernel": "the same question by a kernel distance, which does not depend on the count; not KID.",
    "LPIPS to real": "how different an image looks from the real one of its prompt, by AlexNet.",
    "text-image": "cosine of an image with its prompt, by the embedded model's own small towers; not CLIP score.",
    "top-1 label": "share of images that these towers give their own label first, of all labels of the set.",
    "top-5 labels": "share of images that have their own label among the first five.",
    "FID": "Fréchet distance to the real images on Inception features.",
    "CLIP score": "100 times the cosine of an image with its prompt, by CLIP.",
    "CLIP-IQA": "CLIP's probability of a good photo against a bad one.",
    "ImageReward": "score of a model of human preference.",
    "PSNR to dense": "pixels against the dense model's image of the same prompt and noise: how near, not how good.",
    "SSIM to dense": "structure against the dense model's image: how near, not how good.",
    "LPIPS to dense": "how different an image looks from the dense model's, by AlexNet.",
    "MSE to dense": "squared error of pixels against the dense model's image.",
    "cosine to dense": "cosine of pixels, around mid-grey, with the dense model's image.",
    "GFLOPs": "true ones of one transformer call, the method's own small part not counted.",
    "GFLOPs, MACs counted once": "the same as the paper counts them: a multiplication and addition in a linear layer "
    "is one.",
    "latency": "seconds of a whole image, as the median of turns that all methods take.",
    "limit": "the speed-up that FLOPs alone would allow.",
    "one-step": "the prediction of a single step against dense's, before errors add up over steps.",
    "paper:": "the paper's own figure, of SD3-Medium at 1024 x 1024: only order and sign can be compared.",
}
"""By how a column's heading starts."""
CANDIDATES = {
    "dense": "the model as it is, every token in every block.",
    "fine-tuned": "the dense model trained on as many images as the methods, nothing left out.",
    "Shiva": "trained: runs this percentage of tokens on average, chosen by a router under a learned table of "
    "shares by layer and step.",
    "Sweep": "Shiva with nothing trained: a band of tokens that moves with the steps runs, the others reuse their "
    "last update.",
    "cached": "tokens that are left out reuse their last update instead of none.",
    "shifted to": "the table shifted to another budget, without training again.",
    "flat": "the same checkpoint under one share everywhere instead of its learned table.",
    "fixed": "trained with one share everywhere, without a learned table.",
    "INT8": "feed-forward layers of the last blocks in 8-bit integers.",
    "FFN too": "tokens are merged before the feed-forward layers as well, not only before attention as published.",
}
"""By what a candidate's name has in it."""
OURS = ("Dense", "Shiva-DiT")
TITLE = re.compile(r"(?P<name>[\w -]+?)(?:: | \()")


def baselines() -> dict[str, str]:
    """Methods of others, by the name and paper that they or their module start with."""
    lines = map(first_line, MethodConfig.known.values())
    titled = {found["name"]: line for line in lines if (found := TITLE.match(line))}
    return {name: line.removeprefix(name).lstrip(": ") for name, line in titled.items() if name not in OURS}


def first_line(config: type[MethodConfig]) -> str:
    """Of a method's own description where that names it, of its module's otherwise."""
    own, module = ((of.__doc__ or "").partition("\n")[0] for of in (config, sys.modules[config.__module__]))
    return own if own.startswith(config.__name__) or "et al." in own else module


def meanings(headings: Iterable[str], candidates: Iterable[str]) -> dict[str, str]:
    """Of the words that these columns and candidates are named by."""
    columns, names = tuple(headings), tuple(candidates)
    methods = {**CANDIDATES, **baselines()}
    return {
        **{word: methods[word] for word in methods if any(word in name for name in names)},
        **{word: METRICS[word] for word in METRICS if any(column.startswith(word) for column in columns)},
    }
