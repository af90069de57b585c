"""Training: samples to batches, one loop, its optimizers and precisions, adapters, checkpoints."""

from bluejay.train.attention import attend_in_tiles
from bluejay.train.checkpoints import Checkpoints, Saved, TrainingError, written
from bluejay.train.log import EventFile, plot_loss, read_events, trackers
from bluejay.train.loop import Trainer, TrainResult, prepare
from bluejay.train.lora import LoraLinear, add_lora, base_digest, merged_weights, read_adapter, save_adapter
from bluejay.train.loss import linear_cross_entropy
from bluejay.train.optimizers import Updater, schedule_factor
from bluejay.train.packing import IGNORED, Batch, Blocks, Reader, Rows, Samples, Source, lay_out
from bluejay.train.placing import plan_of, ranks_of, step_of
from bluejay.train.precision import LossScaler, Weights, round_stochastically
from bluejay.train.step import Alone, LocalStep, Ranks, Step

__all__ = [
    "IGNORED",
    "Alone",
    "Batch",
    "Blocks",
    "Checkpoints",
    "EventFile",
    "LocalStep",
    "LoraLinear",
    "LossScaler",
    "Ranks",
    "Reader",
    "Rows",
    "Samples",
    "Saved",
    "Source",
    "Step",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "Updater",
    "Weights",
    "add_lora",
    "attend_in_tiles",
    "base_digest",
    "lay_out",
    "linear_cross_entropy",
    "merged_weights",
    "plan_of",
    "plot_loss",
    "prepare",
    "ranks_of",
    "read_adapter",
    "read_events",
    "round_stochastically",
    "save_adapter",
    "schedule_factor",
    "step_of",
    "trackers",
    "written",
]
