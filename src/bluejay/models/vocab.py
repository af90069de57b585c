"""More rows in embedding and head, for new tokens."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from bluejay.errors import ConfigError
from bluejay.models.gptj import GPTJ


@torch.no_grad()
def resize_vocab(model: GPTJ, vocab_size: int) -> GPTJ:
    """Grow a model in place to `vocab_size` tokens: embedding, head, the head's bias and the config. Returns the model.

    Old rows stay as they are, bit for bit. Each new row, and its bias, is the mean of the old ones: a new token's logit
    is then the mean of the old logits, so it is never likelier than an average token and old probabilities hardly move.
    A model has more rows than its tokenizer has entries for good reason (padding), so it never shrinks.

    Raises:
        ConfigError: `vocab_size` is below the model's, or the head is packed to four bits.

    Source: Hewitt 2021, "Initializing new word embeddings for pretrained language models".
    """
    old_size = model.config.vocab_size
    config = dataclasses.replace(model.config, vocab_size=vocab_size)
    if vocab_size < old_size:
        raise ConfigError(
            asked=f"resize the vocabulary to {vocab_size}",
            found=f"{old_size} rows in embedding and head",
            rule="a vocabulary grows only; rows beyond the tokenizer's entries are padding and do no harm",
            fix=f"ask for at least {old_size}",
        )
    if vocab_size == old_size:
        return model
    if not isinstance(model.lm_head, nn.Linear):
        raise ConfigError(
            asked=f"resize the vocabulary to {vocab_size}",
            found=f"a head that is packed: {type(model.lm_head).__name__}",
            rule="new rows are means of the old ones, which a packed weight no longer holds",
            fix="resize the original model, then quantize it",
        )

    def grown(old: Tensor) -> nn.Parameter:
        mean = old.float().mean(0, keepdim=True).to(old.dtype)
        new = torch.cat((old, mean.expand(vocab_size - old_size, *old.shape[1:])))
        return nn.Parameter(new, requires_grad=old.requires_grad)

    wte, head = model.transformer.wte, model.lm_head
    wte.weight, wte.num_embeddings = grown(wte.weight), vocab_size
    if not config.tie_word_embeddings:
        head.weight = grown(head.weight)
    head.bias, head.out_features = grown(head.bias), vocab_size
    model.config = config
    model.tie_weights()
    return model
