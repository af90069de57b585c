"""The only assembler: from a RunConfig to a model with weights, tokenizer and programs, ready for an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bluejay.checkpoint import Tokenizer, load_tokenizer, load_weights, open_checkpoint, read_config, save_checkpoint
from bluejay.compile import Bound as Program
from bluejay.compile import Executable, Job, Store, compile, compile_all
from bluejay.config import CompileSpec, Layout, ModelConfig, QuantSpec, RunConfig, Workload
from bluejay.errors import CheckpointError, ConfigError, MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.kernels import check_path
from bluejay.kernels import ensure as ensure_kernels
from bluejay.machine import available_memory_bytes, default_cache_folder, give_back_freed_memory
from bluejay.models import GPTJ
from bluejay.quant import QuantizedLinear, QuantizedSource, choose_kernel, fake_quantize_model, quantize_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bluejay.parallel import Meeting, Plan

__all__ = [
    "Built",
    "Program",
    "Programs",
    "build",
    "build_fresh",
    "digest_of_files",
    "fake_quantize",
    "is_packed",
    "locate",
    "pick_device",
    "read_weights",
    "save",
]

BUNDLED = Path(__file__).parent / "assets"

# Of a file in the digest of a model: up to what size all of it counts, and what counts of a larger one.
WHOLE_FILE_BYTES = 64 * 2**20
HEAD_BYTES, SAMPLE_BYTES, NUM_SAMPLES = 2**20, 2**16, 64


class Programs:
    """Gives each step its program: found in the store, or compiled and kept there, with the model's weights bound.

    Attributes:
        store: where programs are kept; its `compilations` counts those made here.
    """

    def __init__(
        self,
        run: RunConfig,
        observe: Observer = ignore,
        meeting: Meeting | None = None,
        store: Store | None = None,
    ) -> None:
        self._meeting = meeting
        self.store = store_of(run) if store is None else store
        self._run = run
        self._observe = observe
        self._has_warned = False

    def ensure(self, jobs: Sequence[tuple[nn.Module, tuple[Tensor, ...], str]], built: Built) -> None:
        """See to it that the store has the programs of all (step, examples, label), several compiled at once.

        Ranks that need the same ones begin with different ones: who comes to one that another is making waits for it.

        Raises:
            MachineError: as `program`.
        """
        device = str(built.device)
        wanted = [Job(step, examples, self.label(label), device) for step, examples, label in jobs]
        if self._meeting is not None:
            index, count = self._meeting.index, self._meeting.count
            wanted = [job for first in range(count) for job in wanted[(index + first) % count :: count]]
        try:
            compile_all(wanted, self._run.compile, self.store, self._observe)
        except MachineError:
            if not self._run.fallback or not built.has_weights:
                raise  # else each program falls back by itself

    def program(self, step: nn.Module, examples: tuple[Tensor, ...], label: str, built: Built) -> Program | None:
        """The program of `step` for the shapes of `examples`, which are the tensors it will be called with.

        A build without weights gets the program into the store, and None.

        Args:
            label: what it is for, in words; shown while it is made, and by `bluejay cache list`.

        Raises:
            MachineError: no C++ compiler, and the run does not fall back to eager.
        """

        def make(spec: CompileSpec) -> Executable:
            told = self.label(label)
            return compile(step, examples, spec, self.store, self._observe, device=built.device, label=told)

        try:
            executable = make(self._run.compile)
        except MachineError as error:
            if not self._run.fallback or not built.has_weights:
                raise
            if not self._has_warned:
                text = f"running without compiled programs, several times slower: {error.found}; {error.fix}"
                self._observe(Event("warning", {"text": text}))
                self._has_warned = True
            executable = make(replace(self._run.compile, backend="eager"))
        host = {} if self._meeting is None else self._meeting.host_functions()
        return executable.bind(step, host) if built.has_weights else None

    def label(self, label: str) -> str:
        """What a program is for, with the part of the model that this rank holds."""
        return label if self._meeting is None else f"{label}, {self._meeting.part}"


def store_of(run: RunConfig) -> Store:
    """The store of a run's programs."""
    return Store(Path(run.cache) if run.cache else default_cache_folder())


@dataclass(frozen=True)
class Built:
    """A model on its device, its tokenizer, its programs, and the run it was built for.

    Attributes:
        context: tokens a row may hold.
        has_weights: false when only programs are wanted and the model is a shape.
        meeting: how ranks settle what comes next, when several hold the model.
        pieces: what `model` is made of, where a plan takes it apart: one for each chunk of this rank's stage.
        warnings: what the checkpoint made us doubt, by name.
        directory: where model and tokenizer came from.
    """

    run: RunConfig
    model: GPTJ
    tokenizer: Tokenizer
    programs: Programs
    device: torch.device
    dtype: torch.dtype
    context: int
    warnings: tuple[str, ...]
    has_weights: bool = True
    directory: Path | None = None
    meeting: Meeting | None = None
    pieces: tuple[GPTJ, ...] = ()


def build(
    run: RunConfig,
    observe: Observer = ignore,
    *,
    weights: bool = True,
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
) -> Built:
    """Read a checkpoint and put its model on the device, in evaluation mode.

    Args:
        weights: false reads no weight: enough to make programs.
        mesh: the ranks of the layout; this one gets its part of the model.
        plan: what each rank holds; by default that of `run.layout`, for generation.

    Raises:
        CheckpointError, TokenizerError: the model's directory is incomplete, damaged or not GPT-J.
        ConfigError: `context` exceeds the model's window, `quantize` does not fit the model, or the mesh is not that of
            the layout.
        MachineError: no such device here, or not the kernel that the run asks for.
    """
    _check_mesh(run.layout if plan is None else plan.layout, mesh)
    device = pick_device(run.device)
    checkpoint = open_checkpoint(locate(run.model), offline=run.offline, observe=observe)
    origin = QuantizedSource(checkpoint, run.quantize, strict=run.strict) if run.quantize else checkpoint
    config = origin.config
    context = config.context(run.context)
    tokenizer = load_tokenizer(checkpoint.directory, config)
    with torch.device("meta"), _SkipInit():
        model = GPTJ(config)
    if packing := run.quantize or checkpoint.quantization:
        layers = [name.removesuffix(".codes") for name in origin.tensors if name.endswith(".codes")]
        quantize_model(model, replace(packing, layers=tuple(layers)))
        give_back_freed_memory()  # a model is packed because memory is short; prompts become a twentieth slower
    dtype = getattr(torch, run.dtype) if run.dtype else checkpoint.dtype
    store = store_of(run)
    if packing and device.type == "cpu":  # without a compiler a warning says so, and torch multiplies
        ensure_kernels(store, observe, cxx=run.compile.cxx)
    _check_kernel(run.compile.kernel, is_packed(model), dtype, device if weights else None)
    choose_kernel(model, run.compile.kernel)
    made = plan if plan is not None or mesh is None else _plan(run, config, dtype, packing, context)
    if weights:  # what is taken apart stays mapped until then, so that each rank holds its own part only
        read = dtype if mesh is None else checkpoint.dtype
        num_bytes = sum(info.num_bytes for info in origin.tensors.values())
        large_pages = mesh is None and device.type == "cpu" and num_bytes < available_memory_bytes()
        load_weights(
            model,
            origin,
            dtype=read,
            strict=run.strict,
            verify=run.verify,
            large_pages=large_pages,
            observe=observe,
        )
    meeting, pieces = None, tuple[GPTJ, ...]()
    if mesh is not None and made is not None:
        from bluejay.parallel import Meeting, apply, as_one  # half a second that one device does not need

        pieces = tuple(piece.to(dtype) for piece in apply(model, made, mesh))
        model = as_one(pieces)
        meeting = Meeting(mesh)
    warnings = list(checkpoint.warnings)
    if device.type == "cpu" and dtype == torch.float16:
        warnings.append("float16 is slow on most CPUs; bfloat16 computes the same model faster (--dtype bfloat16)")
    for warning in warnings:
        observe(Event("warning", {"text": warning}))
    model = (model.to(device) if weights else model.to(dtype)).eval().requires_grad_(False)
    where, programs = checkpoint.directory, Programs(run, observe, meeting, store)
    return Built(
        run, model, tokenizer, programs, device, dtype, context, tuple(warnings), weights, where, meeting, pieces
    )


def _check_kernel(kernel: str, is_packed: bool, dtype: torch.dtype, device: torch.device | None) -> None:
    """See to it that a path of four-bit products, where a run names one, is there and does something.

    Args:
        device: where the products will be computed; None where only programs are made.

    Raises:
        ConfigError: a path that nothing would use.  MachineError: one that is not here.
    """
    if kernel == "auto":
        return
    if not is_packed:
        raise ConfigError(
            asked=f"four-bit products by the path {kernel}",
            found="a model whose weights are not packed to four bits",
            rule="only packed weights are multiplied by a path",
            fix="add --quantize int4-g64, or leave the kernel at auto",
        )
    if kernel == "x8" and dtype != torch.bfloat16:
        raise ConfigError(
            asked="four-bit products by the path x8",
            found=f"inputs in {str(dtype).removeprefix('torch.')}",
            rule="x8 rounds inputs that are bfloat16",
            fix="add --dtype bfloat16, or leave the kernel at auto",
        )
    if device is not None:
        check_path(kernel, device)


def _check_mesh(layout: Layout, mesh: DeviceMesh | None) -> None:
    """
    Raises:
        ConfigError: the layout wants other ranks than there are.
    """
    wanted = (layout.replicas, layout.num_stages, layout.tensor)
    found = (1, 1, 1) if mesh is None else tuple(mesh.shape)
    if wanted != found:
        raise ConfigError(
            asked=f"a model over {wanted[0]} replicas x {wanted[1]} stages x tensor parallel degree {wanted[2]}",
            found="no mesh" if mesh is None else f"a mesh of {' x '.join(map(str, found))}",
            rule="each device of a layout is one rank of a mesh",
            fix="start ranks (bluejay generate --devices N, or torchrun) and give load the mesh of the layout",
        )


def _plan(run: RunConfig, config: ModelConfig, dtype: torch.dtype, packing: QuantSpec | None, context: int) -> Plan:
    """The plan of a run's layout.

    Raises:
        ConfigError: the layout does not fit the model, or the loop is one that ranks cannot run.
    """
    from bluejay.parallel import plan

    if run.loop == "unrolled" and run.layout.num_devices > 1:
        raise ConfigError(
            asked=f"the unrolled loop over {run.layout.num_devices} devices",
            found="a whole answer as one program",
            rule="ranks settle on each token between two programs",
            fix="use the host or the device loop",
        )
    work = Workload(
        dtype=str(dtype).removeprefix("torch."),
        quantize=packing.name if packing else "",
        rows=run.max_rows,
        context=context,
    )
    return plan(config, run.layout, work)


def digest_of_files(run: RunConfig) -> str:
    """A digest of a model's directory, for ranks to compare: on each host the files must say the same.

    It covers every file's name and size, and the content of those up to 64 MiB (configuration, tokenizer, index). Of
    larger ones it covers the first MiB, which holds the header of a safetensors file and so every tensor's name, shape
    and place, and 64 KiB at each of 64 places spread over the rest: a fine-tune differs nearly everywhere. What differs
    between these places only is not seen.

    Raises:
        CheckpointError: the model's directory is incomplete, damaged or not GPT-J.
    """
    total = hashlib.sha256()
    directory = open_checkpoint(locate(run.model), offline=run.offline).directory
    for file in sorted(file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")):
        num_bytes = file.stat().st_size
        total.update(f"{file.name}\0{num_bytes}\0".encode())
        with file.open("rb") as stream:
            if num_bytes <= WHOLE_FILE_BYTES:
                total.update(stream.read())
                continue
            total.update(stream.read(HEAD_BYTES))
            for i in range(NUM_SAMPLES):
                stream.seek(HEAD_BYTES + i * (num_bytes - HEAD_BYTES - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                total.update(stream.read(SAMPLE_BYTES))
    return total.hexdigest()


def build_fresh(run: RunConfig, seed: int, *, mesh: DeviceMesh | None = None, plan: Plan | None = None) -> Built:
    """A model with fresh fp32 weights drawn from `seed`, of the shape and with the tokenizer in a directory.

    With a plan, every rank draws the whole model and keeps its part.

    Raises:
        CheckpointError, TokenizerError: no config.json or no tokenizer there.
        MachineError: no such device here.
    """
    device = pick_device(run.device)
    directory = BUNDLED / "nano" if run.model == "nano" else Path(run.model).expanduser()
    config = read_config(directory)
    tokenizer = load_tokenizer(directory, config)
    with torch.device("meta"), _SkipInit():
        model = GPTJ(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.init_weights(torch.Generator().manual_seed(seed))
    pieces: tuple[GPTJ, ...] = ()
    if mesh is not None and plan is not None:
        from bluejay.parallel import apply, as_one

        pieces = tuple(apply(model, plan, mesh))
        model = as_one(pieces)
    model = model.to(device).eval().requires_grad_(False)
    programs = Programs(run)
    window = config.n_positions
    return Built(run, model, tokenizer, programs, device, torch.float32, window, (), True, directory, None, pieces)


def save(
    built: Built, directory: Path, tensors: Mapping[str, Tensor] | None = None, observe: Observer = ignore
) -> None:
    """Write a model with its tokenizer as a Hugging Face directory, replacing a checkpoint that is there.

    Args:
        tensors: weights by name, instead of those that the model holds.

    Raises:
        CheckpointError: the directory holds something else, or writing failed.  MachineError: the disk has no room.
    """
    if is_packed(built.model):
        raise CheckpointError(
            asked=f"save {directory} as a plain checkpoint",
            found="layers that are packed to four bits",
            rule="what packing took away does not come back",
            fix="save the original model, and pack it with bluejay quantize",
        )
    weights = built.model.state_dict() if tensors is None else tensors
    config, tokenizer = built.model.config, built.directory
    save_checkpoint(directory, weights, config, tokenizer_from=tokenizer, overwrite=True, observe=observe)


def is_packed(model: nn.Module) -> bool:
    """Whether any of a model's layers is packed to four bits."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def fake_quantize(model: nn.Module, format: str) -> None:
    """Let a model's layers round their weights, while it is trained, as a weight format such as `int4-g64` will.

    Raises:
        ConfigError: no such format, or one that does not fit the model or needs calibration.
    """
    fake_quantize_model(model, QuantSpec.parse(format))


def read_weights(directory: Path) -> Mapping[str, Tensor]:
    """The weights of a Hugging Face directory by name, as stored and mapped where possible.

    Raises:
        CheckpointError: incomplete, damaged or not GPT-J.
    """
    checkpoint = open_checkpoint(directory, offline=True)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


class _SkipInit(TorchFunctionMode):
    """Leaves new parameters as they are. On the meta device there is nothing to initialize, and trying to imports all
    of torch's compiler: three quarters of a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def locate(model: str) -> str | Path:
    """What `open_checkpoint` takes for a model's name: `nano` is the bundled one."""
    return BUNDLED / "nano" if model == "nano" else model


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one.

    Raises:
        ConfigError: not a device name.  MachineError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            asked=f"device {name!r}", found="no such kind", rule="auto, cpu, cuda or cuda:N", fix="name one of them"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineError(
            asked=f"device {name!r}",
            found=f"{torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu, or install a CUDA build of torch and a driver",
        )
    return device
