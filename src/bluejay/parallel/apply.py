"""From a finished model and a plan to this rank's pieces of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bluejay.models import GPTJ
from bluejay.parallel.cut import cut_model
from bluejay.parallel.generate import StageOfGPTJ
from bluejay.parallel.mesh import AXES, group_of, place_of
from bluejay.parallel.plan import Plan


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
    if plan.layout.tensor > 1:
        for piece in pieces:
            cut_model(piece, place["tensor"], plan.layout.tensor, group_of(mesh, AXES[2]))
    return pieces


def take_piece(model: GPTJ, first: int, stop: int, has_embedding: bool, has_head: bool) -> GPTJ:
    """Layers `first` to `stop` of a model, with or without its two ends, as modules of the same names.

    The modules are the model's own. A piece's `forward` is that of a stage that generates, once it is placed; training
    calls its `locate`, `embed`, blocks and `logits` and passes the vectors on itself.
    """
    if first == 0 and stop == model.config.n_layer and has_embedding and has_head:
        return model
    with torch.device("meta"):
        piece = StageOfGPTJ(replace(model.config, n_layer=1))
    piece.config = model.config
    layers = nn.ModuleList()
    for number, block in list(model.transformer.h.named_children())[first:stop]:
        layers.add_module(number, block)
    piece.transformer.h = layers
    piece.transformer.drop = model.transformer.drop
    piece.transformer.wte = model.transformer.wte if has_embedding else None  # type: ignore[assignment]
    piece.transformer.ln_f = model.transformer.ln_f if has_head else None  # type: ignore[assignment]
    piece.lm_head = model.lm_head if has_head else None  # type: ignore[assignment]
    return piece.train(model.training)
