"""What stands in T5's place.

The model has no T5, but StableDiffusion3Pipeline.from_pretrained refuses a folder without `text_encoder_3`. So the
folder holds a T5EncoderModel of no layers whose last norm is zero, and a tokenizer that reads nothing: together they
give exactly the `max_sequence_length` zero tokens (256 by default) that the pipeline itself makes when T5 is None.
Only with `text_encoder_3=None, tokenizer_3=None`, as `load_with_arguments` of shiva.evaluate.drawing loads it, does it
accept `max_sequence_length=0`: 16 text tokens, the form the model is mostly trained on, and the one in which image
tokens are the bulk of the work.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel


def make_silent_encoder(width: int) -> T5EncoderModel:
    config = T5Config(vocab_size=2, d_model=width, d_kv=8, d_ff=8, num_layers=0, num_heads=1, is_encoder_decoder=False)
    model = T5EncoderModel(config).eval()
    torch.nn.init.zeros_(model.encoder.final_layer_norm.weight)
    return model


def make_silent_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", model_max_length=512
    )
