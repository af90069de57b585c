"""Tensor parallelism: a finished model's modules with each device's part of the weights.

The model's own code runs on, with fewer heads and a narrower MLP. What is new is where the parts meet. GPT-J adds
attention and MLP to the residual together, so both partial sums are added up by one all-reduce per block, not two, and
the bias of the MLP's second matrix is added after it, once. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bluejay.models import GPTJ, Block, LayerCache, Where, cut_dim
from bluejay.parallel.ranks import Ranks
from bluejay.quant import PackedWeight, QuantizedLinear, pack


class CutEmbedding(nn.Module):
    """One rank's rows of the embedding, from `first` on; the sum over ranks is the whole one's answer."""

    first: Tensor
    keeps_full_precision = True  # as the whole one's: its gradient adds up a row for every occurrence of a token

    def __init__(self, weight: nn.Parameter, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.ranks = weight, ranks
        # A tensor, so that it is an input of programs: ranks then share them.
        first = torch.tensor(ranks.index * weight.shape[0], device=weight.device)
        self.register_buffer("first", first, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, T] to vectors [B, T, E]."""
        row = ids - self.first
        is_elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
        return self.ranks.sum(found.masked_fill(is_elsewhere[..., None], 0))


class Product(nn.Module):
    """A linear layer without its bias, which is kept for the place where it is added."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear | QuantizedLinear)
        self.bias = linear.bias
        if isinstance(linear, nn.Linear):
            self.weight = linear.weight
            self.packed = None
        else:
            linear.bias = None  # type: ignore[assignment]
            self.packed = linear

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.packed(x) if self.packed is not None else F.linear(x, self.weight.to(x.dtype))
        return product


class CutHead(Product):
    """Columns `first` to `first + V/t` of the logits, from a part of the head's matrix."""

    def __init__(self, linear: nn.Module, vocab_size: int, ranks: Ranks) -> None:
        super().__init__(linear)
        self.vocab_size, self.ranks = vocab_size, ranks

    @property
    def first(self) -> int:
        width: int = self.bias.shape[0]
        return self.ranks.index * width

    def part(self, x: Tensor) -> Tensor:
        """This device's columns [..., V/t]; those beyond the vocabulary are -inf."""
        logits = self._columns(x)
        if self.first + logits.shape[-1] > self.vocab_size:
            columns = torch.arange(logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(columns >= self.vocab_size - self.first, -torch.inf)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Vectors [..., E] to all logits [..., V], on every device."""
        return self.ranks.gather(self._columns(x))[..., : self.vocab_size]

    def _columns(self, x: Tensor) -> Tensor:
        return super().forward(self.ranks.copy_in(x)) + self.bias.to(x.dtype)  # fp32 where shared, or shared out


class CutBlock(nn.Module):
    """A block with a part of the heads and of the MLP."""

    def __init__(self, block: Block, ranks: Ranks) -> None:
        super().__init__()
        self.ln_1, self.attn, self.mlp, self.drop = block.ln_1, block.attn, block.mlp, block.drop
        self.mlp.fc_out = Product(block.mlp.fc_out)  # type: ignore[assignment]
        self.ranks = ranks

    def forward(self, x: Tensor, where: Where, cache: LayerCache | None) -> Tensor:
        normed = self.ranks.copy_in(self.ln_1(x))
        bias = self.mlp.fc_out.bias
        if not self.training or not (self.drop.p or self.attn.dropout):
            return self.ranks.sum(self.attn(normed, where, cache) + self.mlp(normed)) + bias + x
        # All ranks drop the same elements of the two sums: what is dropped of each part is dropped of the sum.
        of_attention, of_mlp = self.drop(torch.ones_like(x)), self.drop(torch.ones_like(x))
        with _own_randomness(self.ranks.index, x.device):
            mixed = self.attn(normed, where, cache)
        return self.ranks.sum(mixed * of_attention + self.mlp(normed) * of_mlp) + bias * of_mlp + x


@contextmanager
def _own_randomness(index: int, device: torch.device) -> Iterator[None]:
    """Inside, this rank draws what no other does (for its own heads); outside all go on drawing the same."""
    seed = int(torch.randint(1 << 62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + index)
        yield


def cut_part(name: str, tensor: Tensor, index: int, parts: int) -> Tensor:
    """One device's part of a whole parameter, as a tensor of its own; the vocabulary's last parts end in zeros."""
    dim = cut_dim(name)
    if dim is None or parts == 1:
        return tensor
    size = -(-tensor.shape[dim] // parts)
    start = min(index * size, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    return _padded(part, dim, size) if part.shape[dim] < size else part.clone(memory_format=torch.contiguous_format)


def cut_model(model: GPTJ, ranks: Ranks) -> None:
    """Keep this rank's part of every matrix that the split table cuts, in place.

    Works on a model with all layers or some, with float weights or packed ones.

    Raises:
        ConfigError: packed weights whose groups would be cut.
    """
    index, parts = ranks.index, ranks.count
    for owner_name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            _cut_packed(f"{owner_name}.weight", module, index, parts)
        for leaf, whole in list(module.named_parameters(recurse=False)):
            part = cut_part(f"{owner_name}.{leaf}", whole.detach(), index, parts)
            setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
    ends = model.transformer._modules, model._modules  # a stage may have none of them, or one
    embedding, head = ends[0]["wte"], ends[1]["lm_head"]
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear):
        model.tie_weights()  # they share their part as they shared the whole
    if isinstance(embedding, nn.Embedding):
        ends[0]["wte"] = CutEmbedding(cast(nn.Parameter, embedding.weight), ranks)
    if head is not None:
        ends[1]["lm_head"] = CutHead(head, model.config.vocab_size, ranks)
    for number, block in model.transformer.h.named_children():
        assert isinstance(block, Block)
        block.attn.n_head //= parts
        setattr(model.transformer.h, number, CutBlock(block, ranks))


def _cut_packed(name: str, layer: QuantizedLinear, index: int, parts: int) -> None:
    dim = cut_dim(name)
    assert dim is not None, f"{name} is quantized and not in the split table"
    packed = layer.packed
    if dim == 0 and packed.shape[0] % parts:  # the vocabulary: packed rows of zeros stand for zeros
        rows = -(-packed.shape[0] // parts) * parts
        padded = [_padded(values, 0, rows) for values in packed.plain()]
        codes, scales, biases = pack(*padded)
        packed = PackedWeight(codes, scales, biases, (rows, packed.shape[1]), packed.group_size, name)
    part = packed.cut(dim, index, parts)
    layer.codes, layer.scales, layer.biases = part.codes, part.scales, part.biases
    layer.out_features, layer.in_features = part.shape


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = [size - n if i == dim else n for i, n in enumerate(tensor.shape)]
    return torch.cat((tensor, tensor.new_zeros(missing)), dim)
