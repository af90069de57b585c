"""GPT-J, eager and single-process: the truth that every compiled, quantized or parallel form is tested against.

Dimension letters: B rows, T new tokens per row, S cache slots, E n_embd, H heads, D head_dim, R rotary_dim, F n_inner,
V vocabulary. Parameter names are those of Hugging Face checkpoints.

What GPT-J does differently from most models:
- attention and MLP read the same layer norm and are added to the residual together (one norm per block);
- only the first R of D dimensions of each head are rotated, in interleaved pairs (0,1), (2,3), ...;
- the attention projections have no bias, the MLP and the head do; head and embedding are untied by default.

Source: Wang and Komatsuzaki 2021 (GPT-J-6B); Su et al. 2021 (rotary embedding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bluejay.config import ModelConfig
from bluejay.models.kv_cache import KVCache, LayerCache

_TANH_GELU = nn.GELU(approximate="tanh")
_ACTIVATIONS = {
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu": nn.GELU(),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "swish": nn.SiLU(),
}


def rotary_phases(positions: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's rotation angles, in fp32 whatever the weights' dtype.

    Computed from the positions rather than kept in a buffer: a table in a module is cast with it, and a table in bf16
    cannot tell most positions apart.

    Shapes:
        positions: [B, T] int64   returns: two of [B, 1, T, R/2] fp32
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions[:, None, :, None].float() * (1.0 / 10000.0**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate interleaved pairs of the leading R dimensions of each head; the rest passes through.

    Shapes:
        x: [B, H, T, D]   phases: two of [B, 1, T, R/2]   returns: [B, H, T, D] in x's dtype
    """
    cos, sin = phases
    rotary_dim = 2 * cos.shape[-1]
    even, odd = x[..., 0:rotary_dim:2].float(), x[..., 1:rotary_dim:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


class Where(NamedTuple):
    """Where the new tokens stand, the same for all layers.

    Shapes:
        positions: [B, T] int64   cos, sin: [B, 1, T, R/2] fp32
        visible: [B, 1, T, S] bool, the keys that each query may see; None means all before it
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    visible: Tensor | None

    @property
    def phases(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


class Attention(nn.Module):
    # Of the class: what an instance holds is part of a program's fingerprint. An instance may have another way.
    attend: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attn_pdrop
        self.k_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, where: Where, cache: LayerCache | None) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # [B, H, T, D]

        q = rotate(heads(self.q_proj(x)), where.phases)
        k = rotate(heads(self.k_proj(x)), where.phases)
        v = heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.write(k, v, where.positions)  # [B, H, S, D]
        # Scores are scaled and accumulated in fp32 inside the kernel, so fp16 cannot overflow.
        mixed = self.attend(
            q,
            k,
            v,
            attn_mask=where.visible,
            is_causal=where.visible is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # [B, T, E]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(config.n_embd, config.inner_dim)
        self.fc_out = nn.Linear(config.inner_dim, config.n_embd)
        self.act = _ACTIVATIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(self.act(self.fc_in(x)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, where: Where, cache: LayerCache | None) -> Tensor:
        normed = self.ln_1(x)
        return self.drop(self.attn(normed, where, cache)) + self.drop(self.mlp(normed)) + x


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


class GPTJ(nn.Module):
    """A GPT-J language model with the parameter names of Hugging Face's `GPTJForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding with the head when the config says so (needed again after weights are assigned)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, last: Tensor | None = None
    ) -> Tensor:
        """Logits of each new token, or of one chosen token per row.

        Without `positions`, tokens follow what the cache holds (or start at 0). Padding, on whichever side, is
        position -1: it is stored nowhere, seen by no one, and its own logits are finite and meaningless. With a cache,
        a row's positions must continue its `lengths`; `lengths` grow in place.

        Shapes:
            ids: [B, T] int64   positions: [B, T] int64   last: [B] int64, index into T
            returns: [B, T, V], or [B, V] with `last`
        """
        where = self.locate(ids, positions, cache)
        x = self.embed(ids)
        for i, block in enumerate(self.transformer.h):
            x = block(x, where, None if cache is None else cache.layer(i))
        return self.logits(x, last)

    def locate(
        self, ids: Tensor, positions: Tensor | None, cache: KVCache | None, segments: Tensor | None = None
    ) -> Where:
        """Where the tokens stand and what they may see; a cache's `lengths` grow here.

        With `segments` [B, T] int64, in training, tokens only see those of their own segment. Positions need not begin
        anew in each: rotary attention depends on distances only.
        """
        B, T = ids.shape
        causal = positions is None and cache is None
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand(B, T)
            if cache is not None:
                positions = positions + cache.lengths[:, None]
        visible = None
        if cache is not None:
            cache.lengths.copy_(torch.maximum(cache.lengths, positions.amax(1) + 1))
            slots = torch.arange(cache.num_slots, device=ids.device)
            visible = (slots <= positions[:, :, None])[:, None]  # [B, 1, T, S]
        elif not causal:
            visible = (positions[:, None, :] <= positions[:, :, None]) & (positions[:, None, :] >= 0)
            visible = visible[:, None]  # [B, 1, T, T]
        if segments is not None:
            same = segments[:, None, :] == segments[:, :, None]
            visible = (same & torch.ones(T, T, dtype=torch.bool, device=ids.device).tril())[:, None]  # [B, 1, T, T]
        return Where(positions, *rotary_phases(positions, self.config.rotary_dim), visible)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to vectors [B, T, E]."""
        return self.transformer.drop(self.transformer.wte(ids))

    def logits(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        """Vectors after the last block [B, T, E] to logits [B, T, V], or of one token per row [B, V]."""
        if last is not None:
            x = x[torch.arange(x.shape[0], device=x.device), last]  # [B, E]
        return self.lm_head(self.transformer.ln_f(x))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Fresh weights for training from scratch: N(0, std), projections into the residual / sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                into_residual = name.endswith(("out_proj.weight", "fc_out.weight"))
                scale = (2 * self.config.n_layer) ** -0.5 if into_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)


def positions_from_mask(mask: Tensor) -> Tensor:
    """Positions of a padded batch (left or right) from its attention mask: real tokens count up, padding is -1.

    Shapes:
        mask: [B, T], nonzero for real tokens   returns: [B, T] int64
    """
    real = mask != 0
    return torch.where(real, real.long().cumsum(1) - 1, -1)
