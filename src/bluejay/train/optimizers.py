"""AdamW and Muon over parameter groups, and the learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bluejay.config import OptimizerConfig, ScheduleConfig
from bluejay.train.precision import Trained, Weights, updating


def schedule_factor(update: int, total: int, schedule: ScheduleConfig) -> float:
    """What the learning rate of an update (from 0) is multiplied with: warm-up, flat, then a decay to the floor.

    The first update of a warm-up over w has the factor 1 / w: an update with rate 0 would be wasted.
    """
    if update < schedule.warmup:
        return (update + 1) / schedule.warmup
    first = max(schedule.warmup, total - round(schedule.decay * total))
    if schedule.name == "constant" or update < first:
        return 1.0
    left = max(0.0, (total - update) / max(1, total - first))
    shape = left if schedule.name == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return schedule.floor + (1 - schedule.floor) * shape


class Updater:
    """The optimizers of a run. With masters there is one of each kind; without, one for each parameter, so that only
    one fp32 copy exists at a time.

    Attributes:
        learning_rate: of AdamW in the last update, for people.
    """

    def __init__(self, weights: Weights, config: OptimizerConfig, rows_per_update: int, seed: int) -> None:
        self._weights, self._config, self._seed = weights, config, seed
        self.learning_rate = 0.0
        self._factor = rows_per_update / config.reference_batch if config.reference_batch else 1.0
        by_muon = [one for one in weights if config.name == "muon" and is_block_matrix(one)]
        by_adam = [one for one in weights if one not in by_muon]
        kept = all(one.kept for one in weights)
        self._optimizers: list[tuple[list[Trained], torch.optim.Optimizer]] = []
        for members in [by_adam] if kept else [[one] for one in by_adam]:
            if members:
                self._optimizers.append((members, self._adamw(members)))
        for members in [by_muon] if kept else [[one] for one in by_muon]:
            if members:
                self._optimizers.append((members, self._muon(members)))

    def _adamw(self, members: Sequence[Trained]) -> torch.optim.Optimizer:
        config = self._config
        groups = [
            {"params": [one.master for one in members if decays(one)], "weight_decay": config.weight_decay},
            {"params": [one.master for one in members if not decays(one)], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        rate = config.learning_rate * self._factor
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=config.eps, fused=True)

    def _muon(self, members: Sequence[Trained]) -> torch.optim.Optimizer:
        config = self._config
        return torch.optim.Muon(
            [one.master for one in members],
            lr=config.muon_learning_rate * self._factor,
            weight_decay=config.muon_weight_decay,
            momentum=config.muon_momentum,
            adjust_lr_fn="original",
        )

    def step(self, update: int, factor: float) -> None:
        """One update of all weights from their gradients, at `factor` times the configured learning rates."""
        self.learning_rate = self._config.learning_rate * self._factor * factor
        generator = torch.Generator(next(iter(self._weights)).parameter.device)
        generator.manual_seed(self._seed * 1_000_003 + update)
        for members, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
            with updating(members, generator):
                optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizers' state, by parameter and key: `exp_avg/transformer.wte.weight`."""
        return {
            f"{key}/{one.name}": value
            for members, optimizer in self._optimizers
            for one in members
            for key, value in optimizer.state.get(one.master, {}).items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave, of a run with the same parameters."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            key, _, name = path.partition("/")
            by_name.setdefault(name, {})[key] = value
        for members, optimizer in self._optimizers:
            for one in members:
                if one.name in by_name:
                    device = one.parameter.device
                    optimizer.state[one.master] = {k: v.to(device) for k, v in by_name[one.name].items()}


def decays(one: Trained) -> bool:
    """Whether weight decay is for this parameter: matrices and the embedding, not norms and biases."""
    return one.parameter.dim() > 1


def is_block_matrix(one: Trained) -> bool:
    """Whether this is a matrix inside a block, which Muon is for; embedding and head are AdamW's."""
    return one.parameter.dim() == 2 and ".h." in one.name
