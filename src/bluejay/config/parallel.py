"""How a model lies on several devices, and the work that it must fit there for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from bluejay.config.checks import refusal
from bluejay.config.model import DTYPES
from bluejay.config.quant import QuantSpec

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
OPTIMIZERS = ("adamw", "muon")
JOBS = ("generate", "train")


@dataclass(frozen=True)
class Layout:
    """Stages x tensor parallel degree x replicas = devices.

    Attributes:
        layers_per_device: layers of each stage, in order; -1 takes an even share of what the others leave, the
            remainder goes to the last -1; 0, at either end, is a device for the embedding or the head alone. Empty:
            split so that the slowest stage is as fast as it can be within the memory.
        stages: devices of the pipeline; 0 is the length of `layers_per_device`, or 1.
        tensor: devices that share each layer's matrices.
        replicas: whole copies of the model, each with its own rows.
        shard: replicas share out weights, gradients and optimizer state instead of each keeping all.
        schedule: order of the pipeline's work: "gpipe" (all forward, then all backward), "1f1b" (as soon as possible
            backward), "interleaved" (`chunks` pieces of the model a device, in turn), "zero-bubble" (gradients of
            weights fill the gaps; also with `chunks`). A compiled step is not taken apart like that: it runs eagerly.
        chunks: pieces of the model that each device holds; above 1 only with "interleaved" or "zero-bubble".
        micro_batches: micro-batches that go through the pipeline in one pass; 0 is all of a weight update's.
    """

    layers_per_device: tuple[int, ...] = ()
    stages: int = 0
    tensor: int = 1
    replicas: int = 1
    shard: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    chunks: int = 1
    micro_batches: int = 0

    @property
    def num_stages(self) -> int:
        return self.stages or len(self.layers_per_device) or 1

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.tensor * self.replicas

    def __post_init__(self) -> None:
        counts = self.layers_per_device
        if not isinstance(counts, tuple) or not all(type(n) is int and n >= -1 for n in counts):
            raise _refuse("layers_per_device", counts, "whole numbers from 0, or -1 for an even share of the rest")
        if type(self.stages) is not int or self.stages < 0:
            raise _refuse("stages", self.stages, "0 (as many as layers_per_device names) or a whole number from 1")
        if type(self.micro_batches) is not int or self.micro_batches < 0:
            raise _refuse("micro_batches", self.micro_batches, "0 (all of an update's) or a whole number from 1")
        for name in ("tensor", "replicas", "chunks"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "a whole number from 1")
        if type(self.shard) is not bool:
            raise _refuse("shard", self.shard, "true or false")
        if self.schedule not in SCHEDULES:
            raise _refuse("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        if counts and self.stages and self.stages != len(counts):
            raise _refuse("stages", self.stages, f"{len(counts)}, the length of layers_per_device={list(counts)}")
        if self.schedule != "zero-bubble" and (self.chunks > 1) != (self.schedule == "interleaved"):
            raise _refuse("chunks", self.chunks, '1, or above 1 with schedule="interleaved" or "zero-bubble"')
        if self.chunks > 1 and (counts or self.num_stages < 2):
            raise _refuse("chunks", self.chunks, "used with stages=N, N above 1, and no layers_per_device")
        if self.shard and self.replicas < 2:
            raise _refuse("shard", self.shard, "false with one replica: there is nobody to share with")


@dataclass(frozen=True)
class Workload:
    """What the devices must hold the model for.

    Attributes:
        job: "generate" or "train".
        dtype: of weights, activations and cache; "" is the model's, or float32 where it names none.
        quantize: "" or a format such as int4-g64: blocks and head in 4 bits, for generation.
        rows: rows at once (generate), or rows of one micro-batch of one replica (train).
        context: tokens a row holds; 0 is the model's window.
        prompt_tokens: tokens of a prompt that are read in one call (generate).
        gradient_accumulation: micro-batches of one replica per weight update.
        optimizer: "adamw" keeps two fp32 numbers per weight, "muon" one for the matrices of the layers.
        master_weights: in half precision, the optimizer also keeps each weight in fp32.
        recompute: keep only each layer's input for the backward pass and compute the rest again.
    """

    job: Literal["generate", "train"] = "generate"
    dtype: str = ""
    quantize: str = ""
    rows: int = 1
    context: int = 0
    prompt_tokens: int = 256
    gradient_accumulation: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    master_weights: bool = True
    recompute: bool = False

    @property
    def group_size(self) -> int:
        """Inputs per group of the quantized weights, -1 for one group a row; 0 when they are not quantized."""
        return QuantSpec.parse(self.quantize).group_size if self.quantize else 0

    def __post_init__(self) -> None:
        if self.job not in JOBS:
            raise _refuse("job", self.job, f"one of {', '.join(JOBS)}")
        if self.dtype not in ("", *DTYPES):
            raise _refuse("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if not isinstance(self.quantize, str):
            raise _refuse("quantize", self.quantize, "text such as int4-g64")
        if self.quantize:
            QuantSpec.parse(self.quantize)
        for name in ("rows", "prompt_tokens", "gradient_accumulation"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "a whole number from 1")
        if type(self.context) is not int or self.context < 0:
            raise _refuse("context", self.context, "0 (the whole window) or a number of tokens")
        if self.optimizer not in OPTIMIZERS:
            raise _refuse("optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        for name in ("master_weights", "recompute"):
            if type(getattr(self, name)) is not bool:
                raise _refuse(name, getattr(self, name), "true or false")
        if self.quantize and self.job == "train":
            raise _refuse("quantize", self.quantize, '"" when training: packed weights have no gradient')


_refuse = partial(refusal, "a plan")
