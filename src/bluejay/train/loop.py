"""The one training loop: over any step, any optimizer, any number of devices, from scratch or on top of a checkpoint.

An update is: the micro-batches' gradients, each a share of the mean over all targets of the global batch; their sum
over replicas; clipping; one optimizer step. What happens in an update is a function of the weights, the optimizer's
state, the configuration and the update's number, which is why ten updates straight are four, a stop, and six.

Where several processes train one model, each runs this loop on its part. They decide alike because every number that a
decision hangs on (targets, loss, norm, evaluation) is a sum over all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bluejay.build import Built, build, build_fresh, fake_quantize, is_packed, read_weights, save
from bluejay.config import RunConfig, TrainConfig, as_yaml
from bluejay.errors import ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.files import write_bytes
from bluejay.parallel import Plan
from bluejay.train.checkpoints import Checkpoints, Saved, TrainingError, written
from bluejay.train.lora import add_lora, base_digest, merged_weights, read_adapter, save_adapter
from bluejay.train.optimizers import Updater, schedule_factor
from bluejay.train.packing import Reader, Source
from bluejay.train.precision import DTYPES, LossScaler, Weights
from bluejay.train.step import Alone, LocalStep, Ranks, Step

# Settings that may differ when a run goes on: they change what is kept and shown, not what is learned.
FREE_TO_CHANGE = frozenset(
    "out save_every keep async_save eval_every eval_rows result compile device offline tensorboard wandb "
    "recompute parallel".split()
)
# These may differ as long as their product, the rows of an update, does not.
DIVISION = frozenset({"micro_batch", "gradient_accumulation", "global_batch"})
_GO_ON, _INTERRUPTED, _CANNOT_WRITE = range(3)


@dataclass(frozen=True)
class TrainResult:
    """What came of a run.

    Attributes:
        model: folder of the result: a Hugging Face checkpoint or a PEFT adapter. None when interrupted.
        loss: of the last update, in nats per target; nan when there was none.
        valid_loss, best_loss, best_update: of evaluations, if there were any.
        stopped: `done`, `early` (no better evaluation for `patience` of them) or `interrupted`.
        num_tokens: real tokens that went through the model in this process.
        seconds: spent in updates, compiling apart.
        tokens_per_second: real tokens, over the updates in which nothing was compiled; 0 when there was none.
        num_skipped: updates left out because fp16 gradients overflowed.
        num_empty: updates left out because their rows had no target.
    """

    model: Path | None
    update: int
    loss: float
    valid_loss: float | None
    best_loss: float | None
    best_update: int | None
    stopped: str
    num_tokens: int
    seconds: float
    tokens_per_second: float
    compile_seconds: float
    num_skipped: int
    num_empty: int


class Trainer:
    """A model, its data and its optimizer, ready to run.

    Args:
        built: a model as `build` gives it; it is changed in place.
        train, valid: rows or blocks.
        ranks: the other processes that train the model; nobody unless given.
        step: the work on micro-batches; the model's own on one device unless given.
        data_digest: of the training data, for a resume to compare.
    """

    def __init__(
        self,
        built: Built,
        config: TrainConfig,
        train: Source,
        valid: Source | None = None,
        observe: Observer = ignore,
        *,
        ranks: Ranks | None = None,
        step: Callable[[Built, TrainConfig, Observer], Step] = LocalStep,
        data_digest: str = "",
    ) -> None:
        self.config, self.built = config, built
        self.out = Path(config.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", config.keep)
        self._observe, self._ranks = observe, ranks or Alone()
        self._digest = data_digest
        self._base = base_digest(built.directory) if config.lora.rank and built.directory else ""
        if not config.masters and config.precision == "bf16":
            text = "bf16 without fp32 masters: weights are rounded stochastically, with noise (masters=true: none)"
            observe(Event("warning", {"text": text}))
        model = built.model
        set_dropout(model, config.dropout)
        if config.lora.rank:
            add_lora(model, config.lora, config.seed)
        else:
            model.requires_grad_(True)
        if config.qat:
            fake_quantize(model, config.qat)
        self._step = step(built, config, observe)  # before masters are made: it may share parameters out
        self.weights = Weights(model, DTYPES[config.precision], config.masters)
        accumulation = config.accumulation(self._ranks.count)
        rows = config.rows_per_update(self._ranks.count)
        self.updater = Updater(self.weights, config.optimizer, rows, config.seed)
        self.scaler = LossScaler(config.loss_scale) if config.precision == "fp16" else None
        self.reader = Reader(
            train,
            config.micro_batch,
            accumulation,
            config.seed,
            replicas=self._ranks.count,
            replica=self._ranks.index,
        )
        self.total = config.steps or math.ceil(config.epochs * self.reader.updates_per_epoch)
        self._valid = valid
        self._average = {n: t.clone() for n, t in self.weights.values().items()} if config.ema else {}
        self.update = 0
        self.loss = math.nan
        self.valid_loss: float | None = None
        self.best_loss: float | None = None
        self.best_update: int | None = None
        self._worse = 0
        self._num_tokens = self._num_empty = 0
        self._seconds = 0.0
        self._timed = (0, 0.0)  # tokens and seconds of updates in which nothing was compiled
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, Any]] | None = None

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainResult:
        """Train to the end, or until `should_stop` says so after an update; then a checkpoint is saved.

        Raises:
            TrainingError: the loss or a gradient is not a number, or a checkpoint cannot be written.
        """
        config = self.config
        self._ranks.first(self._write_config)
        self._observe(Event("train.start", self.description()))
        stopped = "done"
        last_saved = self.update
        cuda = [self.built.device] if self.built.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            while self.update < self.total:
                self._one_update()
                signal = self._ranks.highest(self._signal(should_stop))
                if signal == _CANNOT_WRITE:
                    self._finish_saving()
                is_best = False
                if config.eval_every and self.update % config.eval_every == 0 and self.update < self.total:
                    is_best = self._evaluate()
                if is_best or (config.save_every and self.update % config.save_every == 0):
                    self.save()
                    last_saved = self.update
                if config.patience and self._worse >= config.patience:
                    stopped = "early"
                    break
                if signal == _INTERRUPTED:
                    stopped = "interrupted"
                    break
            if stopped == "done" and self._valid is not None:
                self._evaluate()
            if last_saved != self.update:
                self.save()
            self._finish_saving()
        model = None if stopped == "interrupted" else self._write_result()
        result = TrainResult(
            model=model,
            update=self.update,
            loss=self.loss,
            valid_loss=self.valid_loss,
            best_loss=self.best_loss,
            best_update=self.best_update,
            stopped=stopped,
            num_tokens=self._num_tokens,
            seconds=self._seconds,
            tokens_per_second=self._timed[0] / self._timed[1] if self._timed[0] else 0.0,
            compile_seconds=getattr(self._step, "compile_seconds", 0.0),
            num_skipped=self.scaler.num_skipped if self.scaler else 0,
            num_empty=self._num_empty,
        )
        self._observe(Event("train.end", {**asdict(result), "model": str(model) if model else None}))
        return result

    def _one_update(self) -> None:
        started, compiling = time.perf_counter(), getattr(self._step, "compile_seconds", 0.0)
        device = self.built.device
        batches = [batch.to(device) for batch in self.reader.batches(self.update)]
        counts = torch.tensor([[b.num_targets, b.num_tokens] for b in batches], dtype=torch.int64, device=device).sum(0)
        num_targets, num_tokens = (int(x) for x in self._ranks.total(counts))
        factor = schedule_factor(self.update, self.total, self.config.schedule)
        norm = 0.0
        if num_targets:
            loss_scale = self.scaler.scale if self.scaler else 1.0
            scale = torch.tensor(loss_scale / num_targets, dtype=torch.float32, device=device)
            seeds = [self._seed_of(i) for i in range(len(batches))]
            total = self._step.gradients(batches, scale, seeds)
            self.loss = float(self._ranks.total(total)) / num_targets
            self._ranks.sum_gradients(list(self.weights.gradients().values()))
            norm = self._clip(loss_scale)
            skipped = not math.isfinite(norm)
            if not math.isfinite(self.loss) or (skipped and self.scaler is None):
                self._stop_for_nan(norm)
            if self.scaler is not None:
                self.scaler.update(skipped)
                if self.scaler.scale < 1:
                    self._stop_for_nan(norm)
            if not skipped:
                self.updater.step(self.update, factor)
                self._follow()
            self.weights.forget_gradients()
        else:
            self._num_empty += 1
            text = f"update {self.update + 1} is left out: none of its {num_tokens} tokens is a target"
            self._observe(Event("warning", {"text": text}))
        self.update += 1
        compiled = getattr(self._step, "compile_seconds", 0.0) - compiling
        seconds = time.perf_counter() - started - compiled
        self._seconds += seconds
        self._num_tokens += num_tokens
        if not compiled:  # else some of these tokens went through while the code was made
            self._timed = (self._timed[0] + num_tokens, self._timed[1] + seconds)
        fields = {
            "update": self.update,
            "total": self.total,
            "epoch": self.update / self.reader.updates_per_epoch,
            "loss": self.loss if num_targets else None,
            "learning_rate": self.updater.learning_rate,
            "gradient_norm": norm,
            "num_tokens": num_tokens,
            "num_targets": num_targets,
            "seconds": seconds,
            "tokens_per_second": None if compiled else num_tokens / seconds,
            "compiled": compiled > 0,
        }
        if self.scaler is not None:
            fields |= {"loss_scale": self.scaler.scale, "num_skipped": self.scaler.num_skipped}
        self._observe(Event("train.update", fields))

    def _seed_of(self, micro_batch: int) -> int:
        """A seed for dropout that no other micro-batch of the run has."""
        key = (self.config.seed, self.update, micro_batch, self._ranks.index)
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)

    def _clip(self, loss_scale: float) -> float:
        """Take the loss scale out of the gradients and clip them; returns their global norm before clipping."""
        gradients = self.weights.gradients()
        norm = self._ranks.norm(gradients) / loss_scale
        limit = self.config.optimizer.clip_norm
        factor = (min(1.0, limit / (norm + 1e-6)) if limit and math.isfinite(norm) else 1.0) / loss_scale
        if factor != 1.0:
            torch._foreach_mul_(list(gradients.values()), factor)
        return norm

    @torch.no_grad()
    def _follow(self) -> None:
        """Let the moving average follow the weights."""
        values = self.weights.values() if self._average else {}
        for name, average in self._average.items():
            average.lerp_(values[name], 1 - self.config.ema)

    def _stop_for_nan(self, norm: float) -> None:
        raise TrainingError(
            asked=f"update {self.update + 1} of {self.total}",
            found=f"a loss of {self.loss} and a gradient norm of {norm}"
            + (f" with the loss scaled by {self.scaler.scale:g}" if self.scaler else ""),
            rule="a number that is not finite would destroy all weights, so the run stops before it uses it",
            fix=f"{self._last_good()}; lower the learning rate, lengthen the warm-up, or look at this update's data",
        )

    def _last_good(self) -> str:
        wait([self._writing] if self._writing else [])  # its failure is told by who saves next, if anyone does
        last = self.checkpoints.last()
        return f"the last good checkpoint is {last.folder if last else 'none'}"

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """The loss on validation data; returns whether it is the best so far."""
        if self._valid is None:
            return False
        started = time.perf_counter()
        with _Swapped(self.weights, self._average):
            self.valid_loss, num_targets = self.evaluate(self._valid, self.config.eval_rows)
        if not math.isfinite(self.valid_loss):  # nothing is ever less than nan: no later evaluation would be the best
            raise TrainingError(
                asked=f"the evaluation after update {self.update}",
                found=f"a validation loss of {self.valid_loss} over {num_targets} targets",
                rule="better and best are judged by it",
                fix=f"{self._last_good()}; lower the learning rate, or give data.valid targets in its eval_rows rows",
            )
        is_best = self.best_loss is None or self.valid_loss < self.best_loss
        if is_best:
            self.best_loss, self.best_update, self._worse = self.valid_loss, self.update, 0
        else:
            self._worse += 1
        fields = {"update": self.update, "loss": self.valid_loss, "num_targets": num_targets, "is_best": is_best}
        self._observe(Event("train.eval", {**fields, "seconds": time.perf_counter() - started}))
        return is_best

    def evaluate(self, source: Source, max_rows: int = 0) -> tuple[float, int]:
        """Mean loss in nats per target over the first `max_rows` rows (0: all), and how many targets that were."""
        order = np.sort(source.order(0, 0))[: max_rows or None]
        ranks, rows = self._ranks, self.config.micro_batch
        sums = torch.zeros(2, dtype=torch.float64, device=self.built.device)  # loss, targets
        for start in range(0, len(order), rows * ranks.count):
            mine = order[start : start + rows * ranks.count][ranks.index :: ranks.count]
            batch = source.batch(mine, rows)
            if batch.num_targets or ranks.count > 1:  # replicas may have to meet for each batch
                loss = self._step.loss(batch.to(self.built.device))
                sums += torch.stack((loss.double(), sums.new_tensor(batch.num_targets)))
        total, num_targets = ranks.total(sums).tolist()
        return total / num_targets if num_targets else math.nan, int(num_targets)

    # ---- saving and going on ---------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this moment; with `async_save`, while the next updates run.

        Raises:
            TrainingError: it, or the one before, cannot be written; the last good one is intact.
        """
        self._finish_saving()
        started = time.perf_counter()
        weights = self._ranks.whole(self.weights.values())
        tensors = {f"optimizer/{name}": value for name, value in self._ranks.whole(self.updater.state()).items()}
        tensors |= {f"average/{name}": value for name, value in self._ranks.whole(self._average).items()}
        state = {
            "update": self.update,
            "loss": str(self.loss),
            "best_loss": self.best_loss,
            "best_update": self.best_update,
            "worse": self._worse,
            "num_empty": self._num_empty,
            "scaler": self.scaler.state() if self.scaler else None,
            "data": self._digest,
            "base": self._base,
            "rows_per_update": self.config.rows_per_update(self._ranks.count),
            "config": asdict(self.config),
            "torch": torch.__version__,
        }
        if self.config.async_save:  # what the thread reads is its own; the next update changes the weights in place
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

        def write_weights(folder: Path) -> None:
            if self.config.lora.rank:
                save_adapter(folder / "adapter", weights, self.config.lora, self.config.model)
            else:
                save(self.built, folder / "model", self._full(weights))

        def write(update: int = self.update, best: int | None = self.best_update) -> dict[str, Any]:
            saved = self.checkpoints.save(update, write_weights, tensors, state, best)
            return {"update": update, "folder": str(saved.folder), "seconds": time.perf_counter() - started}

        if self.config.async_save and self._ranks.is_first:
            self._writing = self._writer.submit(write)
        elif not self.config.async_save:
            self._observe(Event("train.save", self._ranks.first(write)))

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if one is; its failure is raised here, on all ranks."""

        def wait_for_it() -> dict[str, Any] | None:
            writing, self._writing = self._writing, None
            return None if writing is None else writing.result()

        if (saved := self._ranks.first(wait_for_it)) is not None:
            self._observe(Event("train.save", saved))

    def _signal(self, should_stop: Callable[[], bool]) -> int:
        """What the other ranks must know after an update. A checkpoint that has been written is noted here."""
        if self._writing is not None and self._writing.done():
            if self._writing.exception() is not None:
                return _CANNOT_WRITE
            writing, self._writing = self._writing, None
            self._observe(Event("train.save", writing.result()))
        return _INTERRUPTED if should_stop() else _GO_ON

    def _write_config(self) -> None:
        with written(self.out / "config.yaml"):
            self.out.mkdir(parents=True, exist_ok=True)
            write_bytes(self.out / "config.yaml", as_yaml(self.config).encode())

    def _full(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the model by Hugging Face's names, the trained ones in full precision; shared ones once."""
        return {name: parameter.data for name, parameter in self.built.model.named_parameters()} | values

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it belongs to a run with other settings or other data.
        """
        state = saved.state()
        self._check_same(saved, state)
        if self.config.lora.rank:
            stored = read_adapter(saved.folder / "adapter")
        else:
            stored = dict(read_weights(saved.folder / "model"))
        own, mine = self._ranks.own, self.weights.values()
        self.weights.set({name: own(name, stored[name]) for name in mine})
        tensors = saved.tensors()
        moments = _below("optimizer/", tensors)
        self.updater.load({path: own(path, moments[path]) for path in moments if path.partition("/")[2] in mine})
        self._average = {n: own(n, tensors[f"average/{n}"]).to(self.built.device) for n in self._average}
        self.update = state["update"]
        self.loss = float(state["loss"])
        self.best_loss, self.best_update, self._worse = state["best_loss"], state["best_update"], state["worse"]
        self._num_empty = state["num_empty"]
        if self.scaler is not None:
            self.scaler.load(state["scaler"])

    def _check_same(self, saved: Saved, state: dict[str, Any]) -> None:
        mine = flatten(asdict(self.config))
        theirs = flatten(state["config"])
        differing = [n for n in sorted(mine | theirs) if mine.get(n) != theirs.get(n)]
        rows = self.config.rows_per_update(self._ranks.count)
        # Earlier checkpoints do not say; they are of one replica.
        alone = theirs["global_batch"] or theirs["micro_batch"] * (theirs["gradient_accumulation"] or 1)
        their_rows = state.get("rows_per_update", alone)
        free = FREE_TO_CHANGE | (DIVISION if rows == their_rows else set())
        changed = [name for name in differing if name.partition(".")[0] not in free]
        longer = {"steps", "epochs"}
        refused = [name for name in changed if name not in longer and not name.startswith("data.valid")]
        if state["data"] != self._digest:
            refused.append("the training data")
        if state.get("base", "") != self._base:
            refused.append(f"the weights under the adapters, in {self.built.directory}")
        if their_rows != rows:
            refused.append(f"the rows of an update (were {their_rows}, are {rows})")
        if refused:
            shown = ", ".join(f"{n} (was {theirs.get(n)!r}, is {mine.get(n)!r})" if n in mine else n for n in refused)
            raise ConfigError(
                asked=f"go on from {saved.folder}",
                found=f"another run: {shown}",
                rule="a resumed run is the same run",
                fix="use the settings in config.yaml beside it, or start anew from its model/ with another out",
            )
        if set(changed) & longer:
            text = "steps or epochs differ from the run that is resumed: the learning rate follows the new length"
            self._observe(Event("warning", {"text": text}))

    def _write_result(self) -> Path:
        """The finished model, or adapter, in the dtype of the checkpoint that it came from; in fp32 where its weights
        were trained for packing, because packing must see the very same ones."""
        values = self._ranks.whole(self._average or self.weights.values())
        return self._ranks.first(lambda: self._write_model(values))

    def _write_model(self, values: dict[str, Tensor]) -> Path:
        if self.config.result == "best" and self.best_update is not None and self.best_update != self.update:
            saved = next(saved for saved in self.checkpoints.all() if saved.update == self.best_update)
            average = _below("average/", saved.tensors())
            folder = saved.folder
            stored = read_adapter(folder / "adapter") if self.config.lora.rank else read_weights(folder / "model")
            values = average or dict(stored)
        lora = self.config.lora
        if lora.rank and not lora.merge:
            save_adapter(self.out / "adapter", values, lora, self.config.model)
            return self.out / "adapter"
        if lora.rank:
            assert self.built.directory is not None
            full = merged_weights(self.built.model, read_weights(self.built.directory), values)
        else:
            dtype = getattr(torch, (not self.config.qat and self.built.model.config.dtype) or "float32")
            full = {name: tensor.to(dtype) for name, tensor in self._full(values).items()}
        save(self.built, self.out / "model", full, self._observe)
        return self.out / "model"

    def description(self) -> dict[str, Any]:
        """What the run is, as plain data."""
        source = self.reader.source
        num_elements = self._ranks.num_elements
        return {
            "config": asdict(self.config),
            "update": self.update,
            "total": self.total,
            "updates_per_epoch": self.reader.updates_per_epoch,
            "rows": len(source),
            "rows_per_update": self.config.rows_per_update(self._ranks.count),
            "gradient_accumulation": self.config.accumulation(self._ranks.count),
            "num_targets": source.num_targets,
            "num_without_target": source.num_without_target,
            "num_cut": source.num_cut,
            "num_parameters": num_elements(dict(self.built.model.named_parameters())),
            "num_trained": num_elements({one.name: one.parameter for one in self.weights}),
        }


def prepare(
    config: TrainConfig, observe: Observer = ignore, *, plan: Plan | None = None, mesh: DeviceMesh | None = None
) -> Built:
    """The model of a run on its device, in the precision that training starts from.

    Args:
        plan, mesh: who holds what, and the ranks; this one gets its part of the model.

    Raises:
        CheckpointError, TokenizerError, ConfigError, MachineError: as `build`.  ConfigError: the model is packed.
    """
    full = config.masters and not config.lora.rank
    dtype = "float32" if full else str(DTYPES[config.precision]).removeprefix("torch.")
    run = RunConfig(model=config.model, dtype=dtype, device=config.device, offline=config.offline)
    if config.scratch:
        built = build_fresh(run, config.seed, mesh=mesh, plan=plan)
    else:
        built = build(run, observe, mesh=mesh, plan=plan)
    if is_packed(built.model):
        raise ConfigError(
            asked=f"train {config.model}",
            found="layers that are packed to four bits",
            rule="what is trained must be able to move by less than a code",
            fix="train the original model; --qat trains it for packing",
        )
    return built


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Swapped:
    """Averaged weights in the model while it is evaluated; its own come back afterwards."""

    def __init__(self, weights: Weights, average: dict[str, Tensor]) -> None:
        self._weights, self._average = weights, average

    def __enter__(self) -> None:
        if self._average:
            self._own = {name: tensor.clone() for name, tensor in self._weights.values().items()}
            self._weights.set(self._average)

    def __exit__(self, *error: object) -> None:
        if self._average:
            self._weights.set(self._own)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Dropout of embedding, attention and residual; adapters have their own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = probability  # type: ignore[assignment]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted names; tuples as lists, as JSON has them."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
