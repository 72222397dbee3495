"""Captions of an emoji, and the tokenizer built from them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable

from tokenizers import pre_tokenizers, trainers
from transformers import CLIPTokenizer

from recipes.emoji.common import MAX_TOKENS

TEMPLATES = ("{}", "{}", "a {}", "an emoji of {}", "an emoji of a {}", "a picture of a {}", "the {} emoji")


def captions_of(label: str, tags: list[str], count: int, rng: random.Random) -> list[str]:
    """`count` captions: the bare label first, then templates, label with tags, tags alone."""
    label = label.lower()
    result = [label, f"a {label}"]
    while len(result) < count:
        kind = rng.random()
        some = rng.sample(tags, min(len(tags), rng.randint(1, 3)))
        if kind < 0.45 or not some:
            result.append(rng.choice(TEMPLATES).format(label))
        elif kind < 0.8:
            result.append(f"{label}, {', '.join(some)}")
        else:
            result.append(" ".join(rng.sample(tags, min(len(tags), 4))))
    return result[:count]


SERVINGS = {
    "food-drink": ("a slice of {}", "a piece of {}", "some {}", "a plate with {}"),
    "animals-nature": ("a little {}", "one {}", "a wild {}"),
}
ASIDES = ("the {}", "my {}", "one {}", "a drawing of a {}", "an icon of a {}", "a small {}", "{} on white")


def with_article(words: str) -> str:
    return f"{'an' if words[:1] in 'aeiou' else 'a'} {words}"


def plural(words: str) -> str:
    if words.endswith(("s", "x", "ch", "sh")):
        return f"{words}es"
    if words.endswith("y") and words[-2:-1] not in "aeiou":
        return f"{words[:-1]}ies"
    return f"{words}s"


def paraphrases_of(label: str, group: str, synonyms: list[str], count: int, rng: random.Random) -> list[str]:
    """`count` ways in which a visitor may ask for it: articles, plurals, servings, and `synonyms`, the tags that no
    other label has."""
    label = label.lower()
    result = []
    while len(result) < count:
        word = rng.choice(synonyms) if synonyms and rng.random() < 0.35 else label
        forms = (*SERVINGS.get(group, ()), *ASIDES)
        result.append(
            rng.choice((with_article(word), with_article(word), plural(word), word, *(f.format(word) for f in forms)))
        )
    return result


def own_tags(labels: list[str], tags: list[list[str]]) -> list[list[str]]:
    """Of each label the tags that no other label has, as a tag or as its name."""
    known = {label.lower() for label in labels}
    owners = Counter(tag for some in tags for tag in set(some))
    return [[tag for tag in some if owners[tag] == 1 and tag not in known] for some in tags]


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> CLIPTokenizer:
    """A byte-level BPE in CLIP's own class: frequent words are one token, any other text falls into pieces."""
    blank = CLIPTokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    blank.backend_tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(blank.backend_tokenizer.to_str())["model"]
    vocab = dict(learned["vocab"])
    for byte in alphabet:
        vocab.setdefault(f"{byte}</w>", len(vocab))
    return CLIPTokenizer(
        vocab=vocab, merges=[tuple(merge) for merge in learned["merges"]], model_max_length=MAX_TOKENS
    )
