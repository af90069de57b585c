"""A training run over a plan: what it asks of the planner, and which step and ranks the loop then runs on."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from bluejay.build import Built
from bluejay.config import ModelConfig, TrainConfig, Workload
from bluejay.errors import ConfigError
from bluejay.events import Observer
from bluejay.parallel import Plan, PlannedRanks, PlannedStep, plan
from bluejay.train.precision import DTYPES
from bluejay.train.step import Alone, LocalStep, Ranks, Step
from bluejay.units import format_bytes


def plan_of(config: TrainConfig, model: ModelConfig, device_memory: int = 0) -> Plan:
    """Who holds what of a run's model; a pure function, before any weight is read.

    Args:
        model: of the checkpoint that is trained.
        device_memory: bytes of each device; 0 does not ask whether it fits.

    Raises:
        ConfigError: the layout contradicts the model or the batch, with the nearest one that does not; or adapters are
            to fit a memory, of which a plan knows nothing.
        MachineError: a device would overflow, with its largest items and what would shrink them.
    """
    if config.lora.rank and device_memory:
        raise ConfigError(
            asked=f"a plan of lora.rank={config.lora.rank} for {format_bytes(device_memory)}",
            found="a planner that counts the state of all weights",
            rule="adapters need far less: a refusal would be wrong",
            fix="leave --device-memory out",
        )
    work = Workload(
        job="train",
        dtype=str(DTYPES[config.precision]).removeprefix("torch."),
        rows=config.micro_batch,
        context=config.data.length,
        gradient_accumulation=config.accumulation(),
        optimizer=config.optimizer.name,
        master_weights=config.masters,
        recompute=config.recompute,
    )
    return plan(model, config.parallel, work, device_memory)


def ranks_of(plan: Plan, mesh: DeviceMesh | None) -> Ranks:
    """The processes that train the plan's model together."""
    return Alone() if mesh is None else PlannedRanks(plan, mesh)


def step_of(plan: Plan, mesh: DeviceMesh | None) -> Callable[[Built, TrainConfig, Observer], Step]:
    """The work on micro-batches: of a whole model where this process has one, else of its part."""
    layout = plan.layout
    if mesh is None or (layout.num_stages == 1 and layout.tensor == 1 and not layout.shard):
        return LocalStep

    def planned(built: Built, config: TrainConfig, observe: Observer) -> Step:
        return PlannedStep(built.pieces, plan, mesh, config.label_smoothing, config.compile, observe)

    return planned
