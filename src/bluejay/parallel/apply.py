"""From a finished model and a plan to this rank's pieces of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bluejay.models import GPTJ
from bluejay.parallel.cut import cut_model
from bluejay.parallel.generate import StageOfGPTJ
from bluejay.parallel.mesh import place_of
from bluejay.parallel.plan import Plan
from bluejay.parallel.ranks import Ranks


def apply(model: GPTJ, plan: Plan, mesh: DeviceMesh) -> list[GPTJ]:
    """This rank's pieces of `model`, one for each chunk of its stage; the model itself is used up.

    The order: a model is quantized before (`quant.quantize_model`), because groups are those of whole rows; then it is
    taken apart into stages, so that nothing is cut that is not kept; then cut, which copies each part and lets go of
    the whole. Replicas share out what is left last (`PlannedStep`), because they do so with the parts as they are.
    """
    place = place_of(mesh)
    stage = plan.stages[place["stage"]]
    last = len(stage.pieces) - 1
    pieces = [
        take_piece(model, first, stop, stage.has_embedding and i == 0, stage.has_head and i == last)
        for i, (first, stop) in enumerate(stage.pieces)
    ]
    if plan.workload.job == "generate":
        for piece in pieces:
            if isinstance(piece, StageOfGPTJ):
                piece.place(mesh)
                # Nobody asks for these weights by the whole model's names: equal stages are one program.
                piece.transformer.h = nn.ModuleList(piece.transformer.h.children())
    if plan.layout.tensor > 1:
        for piece in pieces:
            cut_model(piece, Ranks.along(mesh, "tensor"))
    return pieces


def take_piece(model: GPTJ, first: int, stop: int, has_embedding: bool, has_head: bool) -> GPTJ:
    """Layers `first` to `stop` of a model, with or without its two ends, as modules of the same names.

    The modules are the model's own. A piece's `forward` is that of a stage that generates, once it is placed; training
    calls its `locate`, `embed`, blocks and `logits` and passes the vectors on itself.
    """
    if first == 0 and stop == model.config.n_layer and has_embedding and has_head:
        return model
    layers = list(model.transformer.h.named_children())[first:stop]
    return _holding(layers, model, model if has_embedding else None, model if has_head else None)


def as_one(pieces: Sequence[GPTJ]) -> GPTJ:
    """All the modules of a rank's pieces in one, under the names that they have in the whole model."""
    if len(pieces) == 1:
        return pieces[0]
    layers = [named for piece in pieces for named in piece.transformer.h.named_children()]
    first, last = pieces[0], pieces[-1]
    has_embedding, has_head = first.transformer.wte is not None, last.lm_head is not None
    return _holding(layers, first, first if has_embedding else None, last if has_head else None)


def _holding(layers: Sequence[tuple[str, nn.Module]], model: GPTJ, embedding: GPTJ | None, head: GPTJ | None) -> GPTJ:
    """A piece of `model` with these layers, and the two ends of other pieces or none."""
    with torch.device("meta"):
        piece = StageOfGPTJ(replace(model.config, n_layer=1))
    piece.config = model.config
    piece.transformer.h = nn.ModuleList()
    for number, block in layers:
        piece.transformer.h.add_module(number, block)
    piece.transformer.drop = model.transformer.drop
    piece.transformer.wte = None if embedding is None else embedding.transformer.wte  # type: ignore[assignment]
    piece.transformer.ln_f = None if head is None else head.transformer.ln_f  # type: ignore[assignment]
    piece.lm_head = None if head is None else head.lm_head  # type: ignore[assignment]
    return piece.train(model.training)
