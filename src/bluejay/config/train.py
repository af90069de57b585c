"""What a training run is made of: one frozen dataclass with sections, read strictly from YAML and `--set a.b=c`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from bluejay.config.checks import near
from bluejay.config.parallel import Layout
from bluejay.config.quant import QuantSpec
from bluejay.errors import ConfigError

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out", "lm_head")
_PRESETS = resources.files("bluejay.config") / "presets" / "train"
_WORDS = {True: ("true", "yes", "on", "1"), False: ("false", "no", "off", "0")}


@dataclass(frozen=True)
class DataConfig:
    """Which text is learned, and how it is laid out.

    Attributes:
        train, valid: a `.txt` file (documents joined by the literal end of text), a `.jsonl` file, a folder that
            Hugging Face `datasets` saved, or a hub id (`owner/name`, `owner/name:configuration`).
        train_split, valid_split: which split of a data set; files have none.
        prompt, answer: templates over a row's fields, such as `mnli hypothesis: {hypothesis}`; a row's text is prompt,
            answer, end of text. For `.txt` leave both out.
        labels: names for whole-number values of the field `label`, by their number, for use as `{label}`.
        learn: `all` tokens, or only the `answer` and the end of text.
        layout: `blocks` packs documents one after another into blocks of `length`; `rows` puts one sample in a row.
        within_documents: in blocks, attention does not reach into the document before.
        length: tokens that go through the model in one row; 0 is the model's window.
    """

    train: str = ""
    valid: str = ""
    train_split: str = "train"
    valid_split: str = "validation"
    prompt: str = ""
    answer: str = ""
    labels: tuple[str, ...] = ()
    learn: Literal["all", "answer"] = "all"
    layout: Literal["blocks", "rows"] = "blocks"
    within_documents: bool = False
    length: int = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes an update.

    Attributes:
        name: `adamw` for all weights; `muon` for the matrices of the blocks, adamw for the rest.
        learning_rate, betas, eps: of AdamW.
        weight_decay: decoupled; norms and biases have none.
        muon_learning_rate, muon_momentum, muon_weight_decay: of Muon.
        clip_norm: gradients are scaled so that their global norm is at most this; 0 leaves them.
        reference_batch: the learning rate is meant for this global batch and scaled linearly from it; 0 does not scale.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0
    clip_norm: float = 1.0
    reference_batch: int = 0


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the updates, as a factor.

    Attributes:
        name: shape of the decay.
        warmup: updates over which the factor rises to 1.
        decay: the last part of the run over which it falls, 0 to 1; before that it is flat. 1: right after the warm-up.
        floor: where it ends.
    """

    name: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = 0
    decay: float = 1.0
    floor: float = 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters instead of full fine-tuning.

    Attributes:
        rank: columns of the adapters; 0 trains all weights.
        alpha: the adapters' product is scaled by alpha / rank.
        dropout: on the adapters' input.
        targets: which matrices get one.
        merge: the result is a whole model with the adapters added in (False: an adapter that PEFT reads).
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    merge: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run.

    Attributes:
        model: `nano`, a directory, or a hub id; with `scratch`, only its shape and tokenizer are used.
        scratch: begin with fresh weights drawn from the seed.
        out: folder of checkpoints, events, plot and result.
        steps: weight updates; 0 takes them from `epochs`.
        epochs: passes over the data.
        micro_batch: rows that go through the model at once.
        gradient_accumulation: micro-batches per update; 0 follows from `global_batch`.
        global_batch: rows per update; 0 follows from `gradient_accumulation`.
        seed: of fresh weights, order, dropout and stochastic rounding.
        precision: what is computed in. Gradients are summed in fp32 in any case.
        masters: keep fp32 weights beside bf16 or fp16 ones. Without them bf16 weights are rounded stochastically.
        loss_scale: fp16 only: the first factor of the dynamic loss scaling.
        recompute: keep only each layer's input, and compute the layer again in the backward pass.
        dropout: of embedding, attention and residual.
        label_smoothing: probability given to all tokens alike.
        ema: decay of an exponential moving average of the weights, which is evaluated and becomes the result; 0: none.
        eval_every, eval_rows: updates between evaluations (0: at the end only), and rows of each (0: all).
        patience: stop after so many evaluations without a better one; 0 never does.
        save_every, keep: updates between checkpoints (0: at the end only), and how many are kept besides the best.
        async_save: write checkpoints out of a copy while the next updates run; the copy takes as much memory again.
        parallel: the devices that the model lies on; a run may go on under another layout.
        result: the weights of the `last` update, or those of the `best` evaluation.
        compile: `auto` compiles the step where there is a C++ compiler; `inductor` insists; `eager` never does.
        device: cpu, cuda, cuda:N; "auto" takes CUDA where there is one.
        offline: never ask the network for a hub id.
        qat: train with weights rounded as group quantization will round them, such as `int4-g64`; "" does not.
        tensorboard, wandb: also send figures there, where it is installed.
    """

    model: str = "nano"
    scratch: bool = False
    out: str = "build/train"
    data: DataConfig = field(default_factory=DataConfig)
    steps: int = 0
    epochs: float = 1.0
    micro_batch: int = 8
    gradient_accumulation: int = 0
    global_batch: int = 0
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    masters: bool = True
    loss_scale: float = 65536.0
    recompute: bool = False
    dropout: float = 0.0
    label_smoothing: float = 0.0
    ema: float = 0.0
    eval_every: int = 0
    eval_rows: int = 0
    patience: int = 0
    save_every: int = 0
    keep: int = 2
    async_save: bool = False
    parallel: Layout = field(default_factory=Layout)
    result: Literal["last", "best"] = "last"
    compile: Literal["auto", "inductor", "eager"] = "auto"
    device: str = "auto"
    offline: bool = False
    qat: str = ""
    tensorboard: bool = False
    wandb: bool = False

    def __post_init__(self) -> None:
        _check_types(self, "")
        _check_ranges(self)
        _check_together(self)

    def accumulation(self, replicas: int = 0) -> int:
        """Micro-batches per update of each replica: the one place that decides it.

        Args:
            replicas: 0: those of the layout.

        Raises:
            ConfigError: `global_batch` and `gradient_accumulation` contradict each other.
        """
        replicas = replicas or self.parallel.replicas
        rows = self.micro_batch * replicas
        given = self.gradient_accumulation
        if not self.global_batch:
            return given or 1
        if self.global_batch % rows or (given and given * rows != self.global_batch):
            raise ConfigError(
                asked=f"global_batch={self.global_batch} with micro_batch={self.micro_batch}, "
                f"gradient_accumulation={given or 'not set'} and {replicas} replicas",
                found=f"{rows} x {given or self.global_batch / rows:g} = {rows * given or self.global_batch} rows",
                rule="global batch = micro-batch x gradient accumulation x replicas, in whole numbers",
                fix=f"set one of the two, global_batch to a multiple of {rows}",
            )
        return self.global_batch // rows

    def rows_per_update(self, replicas: int = 0) -> int:
        """The global batch, in rows."""
        return self.micro_batch * self.accumulation(replicas) * (replicas or self.parallel.replicas)


def parse_train(raw: Mapping[str, Any], source: str, base: TrainConfig | None = None) -> TrainConfig:
    """The run that plain data describes, on top of `base` or the defaults; no key may be unknown.

    Raises:
        ConfigError: naming the key and the nearest known ones, or the value and what it must be.
    """
    config: TrainConfig = _merge(base or TrainConfig(), raw, source, "")
    return config


def read_train(file: str | Path = "", settings: Sequence[str] = ()) -> TrainConfig:
    """The run of a YAML file or a preset's name, with settings such as `optimizer.learning_rate=1e-4` on top.

    The key `preset` of a file names the preset that the file builds on.

    Raises:
        ConfigError: not readable, not a mapping, an unknown key or a value of the wrong kind.
    """
    config = TrainConfig() if not str(file) else _read(str(file))
    tree: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(
                asked=f"--set {setting}", found="no name and value", rule="a setting is name=value", fix="--set a.b=c"
            )
        node = tree
        *parents, leaf = path.strip().split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(asked=f"--set {setting}", found=f"{parent} set twice", fix="set it once")
        node[leaf] = _Text(text)
    return parse_train(tree, "--set", config)


def train_preset_names() -> tuple[str, ...]:
    """The names of training presets, sorted."""
    names = (entry.name for entry in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def as_yaml(config: TrainConfig) -> str:
    """The whole run as YAML that `read_train` reads back."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True, width=120)


class _Text(str):
    """A value from the command line, to be read by the type of its field."""


def _read(file: str) -> TrainConfig:
    if file in train_preset_names():
        return parse_train(yaml.safe_load((_PRESETS / f"{file}.yaml").read_text(encoding="utf-8")), f"preset {file}")
    try:
        raw = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            asked=f"the training run {file}",
            found=f"{getattr(error, 'strerror', None) or str(error).splitlines()[0]}{near(file, train_preset_names())}",
            rule=f"a YAML file, or one of the presets {', '.join(train_preset_names())}",
            fix="name a readable file or a preset",
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            asked=f"the training run {file}", found=f"a {type(raw).__name__}", rule="", fix="write key: value lines"
        )
    base = raw.pop("preset", None)
    if base is not None and base not in train_preset_names():
        raise ConfigError(
            asked=f"preset: {base!r} in {file}",
            found=f"no training preset of that name{near(str(base), train_preset_names())}",
            rule=f"the presets are {', '.join(train_preset_names())}",
            fix="use one of these names",
        )
    return parse_train(raw, file, _read(base) if base else None)


def _merge(base: Any, raw: Any, source: str, prefix: str) -> Any:
    """`base` with the values of a mapping, section by section."""
    if not isinstance(raw, Mapping):
        raise _refuse(prefix.rstrip("."), raw, "a section of key: value lines", source)
    hints = get_type_hints(type(base))
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(
                asked=f"{name}: {value!r} in {source}",
                found=f"no setting of that name{near(str(key), hints)}",
                rule="an unknown setting is never ignored",
                fix=f"correct or remove it; the settings here are {', '.join(hints)}",
            )
        current = getattr(base, key)
        if is_dataclass(current):
            values[key] = _merge(current, value, source, f"{name}.")
        else:
            values[key] = _value(hints[key], value, name, source)
    return replace(base, **values)


def _value(kind: Any, value: Any, name: str, source: str) -> Any:
    """A value as its field's type, from YAML or the command line."""
    text = str(value) if isinstance(value, _Text) else None
    if get_origin(kind) is tuple:
        items = value
        if text is not None:
            items = [_Text(part.strip()) for part in text.strip("[]() ").split(",") if part.strip()]
        if not isinstance(items, list | tuple):
            raise _refuse(name, value, "a list", source)
        return tuple(_value(get_args(kind)[0], item, name, source) for item in items)
    if kind is bool and text is not None:
        for meaning, words in _WORDS.items():
            if text.lower() in words:
                return meaning
        raise _refuse(name, text, f"one of {' '.join((*_WORDS[True], *_WORDS[False]))}", source)
    if kind is float and isinstance(value, str):  # YAML takes 1e-5 for text
        try:
            return float(value)
        except ValueError:
            raise _refuse(name, value, "a number", source) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and text is not None:
        try:
            return int(text)
        except ValueError:
            raise _refuse(name, text, "a whole number", source) from None
    return value if text is None else text


def _check_types(config: Any, prefix: str) -> None:
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            _check_types(value, f"{prefix}{name}.")
        elif get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise _refuse(f"{prefix}{name}", value, f"one of {', '.join(get_args(kind))}")
        elif get_origin(kind) is tuple:
            item = get_args(kind)[0]
            if not isinstance(value, tuple) or not all(type(i) is item for i in value):
                raise _refuse(f"{prefix}{name}", value, f"a list of {item.__name__}")
        elif type(value) is not kind and not (kind is float and type(value) is int):
            raise _refuse(f"{prefix}{name}", value, {bool: "true or false"}.get(kind, f"of type {kind.__name__}"))


def _check_ranges(config: TrainConfig) -> None:
    at_least = {
        "steps": 0,
        "micro_batch": 1,
        "gradient_accumulation": 0,
        "global_batch": 0,
        "seed": 0,
        "eval_every": 0,
        "eval_rows": 0,
        "patience": 0,
        "save_every": 0,
        "keep": 1,
        "loss_scale": 1,
        "data.length": 0,
        "optimizer.learning_rate": 0,
        "optimizer.eps": 0,
        "optimizer.weight_decay": 0,
        "optimizer.muon_learning_rate": 0,
        "optimizer.muon_weight_decay": 0,
        "optimizer.clip_norm": 0,
        "optimizer.reference_batch": 0,
        "schedule.warmup": 0,
        "lora.rank": 0,
    }
    for name, least in at_least.items():
        value = _get(config, name)
        if not least <= value < float("inf"):
            raise _refuse(name, value, f"at least {least}")
    below_one = ("dropout", "label_smoothing", "ema", "lora.dropout", "optimizer.muon_momentum")
    for name in below_one:
        if not 0 <= _get(config, name) < 1:
            raise _refuse(name, _get(config, name), "at least 0 and below 1")
    for name in ("schedule.decay", "schedule.floor"):
        if not 0 <= _get(config, name) <= 1:
            raise _refuse(name, _get(config, name), "between 0 and 1")
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise _refuse("optimizer.betas", config.optimizer.betas, "two numbers, at least 0 and below 1")
    if not 0 < config.epochs < float("inf"):
        raise _refuse("epochs", config.epochs, "above 0, and finite")
    unknown = [target for target in config.lora.targets if target not in LORA_TARGETS]
    if unknown or not config.lora.targets:
        raise _refuse("lora.targets", config.lora.targets, f"some of {', '.join(LORA_TARGETS)}")


def _check_together(config: TrainConfig) -> None:
    given = config.micro_batch * config.gradient_accumulation  # both given: how many replicas is known only later
    config.accumulation(max(1, config.global_batch // given) if given else 0)
    if config.qat:
        QuantSpec.parse(config.qat)
    rows, answer = config.data.layout == "rows", bool(config.data.answer)
    contradictions = [
        (
            config.data.learn == "answer" and not answer,
            "data.learn=answer without data.answer",
            "the answer's template says which part is learned",
            "set data.answer",
        ),
        (
            rows and config.data.within_documents,
            "data.within_documents with data.layout=rows",
            "a row holds one document",
            "leave within_documents out",
        ),
        (
            not config.masters and config.precision == "fp16",
            "precision=fp16 with masters=false",
            "fp16 weights cannot hold updates below 6e-8",
            "keep the masters, or use bf16",
        ),
        (
            config.ema > 0 and (config.lora.rank > 0 or not config.masters),
            "ema with LoRA or without masters",
            "the average is of fp32 weights of the whole model",
            "leave ema out",
        ),
        (
            (config.patience > 0 or config.result == "best") and not config.data.valid,
            f"patience={config.patience}, result={config.result} without data.valid",
            "better is judged on validation text",
            "set data.valid",
        ),
        (
            config.patience > 0 and not config.eval_every,
            f"patience={config.patience} with eval_every=0",
            "patience counts evaluations",
            "set eval_every",
        ),
        (
            config.scratch and config.lora.rank > 0,
            "scratch with LoRA",
            "an adapter needs a trained model",
            "set lora.rank=0",
        ),
        (
            bool(config.qat) and config.lora.rank > 0,
            f"qat={config.qat} with LoRA",
            "quantization-aware training moves the weights themselves",
            "choose one of them",
        ),
        (
            bool(config.qat) and not config.masters,
            f"qat={config.qat} without masters",
            "small steps between two codes must add up somewhere",
            "keep the masters",
        ),
        (
            config.lora.rank > 0 and _divides_layers(config.parallel),
            f"LoRA over {_places(config.parallel)}",
            "an adapter is trained on devices that hold the whole layer it belongs to, and all layers",
            "use replicas only (parallel.replicas), without parallel.shard, or set lora.rank=0",
        ),
        (
            bool(config.qat) and _divides_layers(config.parallel),
            f"qat={config.qat} over {_places(config.parallel)}",
            "what is rounded for packing are whole matrices in full precision",
            "use replicas only (parallel.replicas), without parallel.shard, or leave qat out",
        ),
        (
            config.optimizer.name == "muon" and (config.parallel.tensor > 1 or config.parallel.shard),
            f"optimizer.name=muon over {_places(config.parallel)}",
            "muon's step is of whole matrices, and these are cut",
            "use stages and replicas without parallel.shard, or optimizer.name=adamw",
        ),
        (
            not config.masters and config.precision == "bf16" and config.parallel.shard,
            "masters=false with parallel.shard=true",
            "what replicas share out is the fp32 state that masters=false does without",
            "choose one of them",
        ),
        (
            "gptq" in config.qat,
            f"qat={config.qat}",
            "gptq rounds by calibration text, which no forward pass of training has",
            "train for int4-g64 or its -mse form",
        ),
    ]
    for wrong, found, rule, fix in contradictions:
        if wrong:
            raise ConfigError(asked="a training run with these settings together", found=found, rule=rule, fix=fix)


def _divides_layers(layout: Layout) -> bool:
    """Whether any device holds less than the whole model."""
    return layout.num_stages > 1 or layout.tensor > 1 or layout.shard


def _places(layout: Layout) -> str:
    """A layout in words."""
    shared = " that share out their weights" if layout.shard else ""
    return f"{layout.num_stages} stages x tensor parallel degree {layout.tensor} x {layout.replicas} replicas{shared}"


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _refuse(name: str, value: object, rule: str, source: str = "") -> ConfigError:
    return ConfigError(
        asked=f"a training run with {name}={value!r}{f' in {source}' if source else ''}",
        found=f"{name}={value!r}",
        rule=f"{name} must be {rule}",
        fix=f"correct {name}",
    )
