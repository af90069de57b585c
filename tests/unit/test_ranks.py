"""What ranks are without other ranks: how programs see them, and how their starter reads their ends."""

from __future__ import annotations

import pickle
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bluejay.build import digest_of_files
from bluejay.cli import environment, launch
from bluejay.compile import SignatureError, TensorSpec, fingerprint
from bluejay.compile import environment as environment_of
from bluejay.compile.graph import trace
from bluejay.compile.host import HostCall
from bluejay.compile.inductor import Chain
from bluejay.config import CompileSpec, Layout, RunConfig
from bluejay.errors import BluejayError, ConfigError
from bluejay.parallel import Rank, mesh, rows_at_once
from bluejay.parallel.ranks import Ranks


class Layer(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self.ranks = nn.Linear(8, 8), ranks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ranks.sum(self.inner(x))


class Stage(nn.Module):
    """Receives, sums twice, and sends."""

    def __init__(self, index: int = 0, count: int = 2) -> None:
        super().__init__()
        self.ranks = Ranks("tensor", count, index, None)
        self.layers = nn.ModuleList(Layer(self.ranks) for _ in range(3))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.ranks.receive((*ids.shape, 8), torch.float32, ids.device)
        for layer in self.layers:
            x = layer(x)
        return (self.ranks.send(x),)


def test_a_graph_is_cut_where_ranks_meet() -> None:
    """Catches a sum that is compiled into a program or dropped from it, and equal layers that are not one program."""
    traced = trace(Stage(), (torch.zeros(2, 3, dtype=torch.int64),), ("ids",), "cpu", "shared")
    names = [call.name if isinstance(call, HostCall) else call.program for call in traced.calls]
    sums = [name for name in names if isinstance(name, str)]
    assert sums == ["tensor.receive", "tensor.sum", "tensor.sum", "tensor.sum", "tensor.send"]
    # The first layer up to its sum, the end of one with the beginning of the next (twice), the end of the last.
    assert [name for name in names if isinstance(name, int)] == [0, 1, 1, 2]


def test_a_program_that_leaves_work_to_the_host_says_so_when_it_is_bound() -> None:
    """Catches a program of one rank of several that runs alone, without what the others would have added."""
    plan = {
        "programs": [],
        "calls": [{"name": "tensor.sum", "input": 0, "output": 1, "shape": [2], "dtype": "float32"}],
        "returns": [1],
        "num_values": 2,
    }
    chain = Chain([], plan, torch.device("cpu"))
    with pytest.raises(SignatureError, match=r"tensor\.sum"):
        chain.start([], {})
    run = chain.start([], {"tensor.sum": lambda x, shape, dtype, device: torch.full(shape, 2.0, dtype=dtype)})
    assert run([torch.ones(2)])[0].tolist() == [2, 2]


def fingerprint_of(module: nn.Module) -> str:
    inputs = (TensorSpec("ids", (2, 3), "int64", (3, 1)),)
    here = environment_of(torch.device("cpu"), None)
    return fingerprint(module, inputs, CompileSpec(), here, device="cpu", threads=1).digest


def test_ranks_of_equal_shape_share_a_fingerprint() -> None:
    """Law 8. Catches a rank's number in a fingerprint, so that no two share, and a cut that is not in it."""
    assert fingerprint_of(Stage(0)) == fingerprint_of(Stage(1))
    assert fingerprint_of(Stage(0)) != fingerprint_of(Stage(0, count=4))
    assert pickle.loads(pickle.dumps(Stage(1).ranks)) == Stage(0).ranks  # to a process that compiles


@given(st.integers(1, 64), st.integers(1, 16))
def test_groups_of_rows_are_equal_and_fill_the_stages(num_rows: int, num_stages: int) -> None:
    """Catches rows left out, groups of two sizes (two programs), and a stage without a group though there are rows."""
    size = rows_at_once(num_rows, num_stages)
    assert num_rows % size == 0
    assert num_rows // size >= min(num_rows, num_stages)
    assert all(
        num_rows % more or num_rows // more < min(num_rows, num_stages) for more in range(size + 1, num_rows + 1)
    )


@pytest.mark.parametrize(
    ("falls", "cause"),
    [
        ([(0, -signal.SIGABRT), (1, -signal.SIGKILL)], 1),  # torch's end of a rank that lost a peer
        ([(0, launch.LOST), (1, 1)], 1),
        ([(1, launch.LOST), (0, 2)], 0),
        ([(1, 1), (0, 1)], 0),  # both say the same, and the first one is heard
        ([(1, -40), (0, -signal.SIGABRT)], 1),
        ([(2, 1), (1, 1)], 2),
    ],
)
def test_causes_come_before_consequences(falls: list[tuple[int, int]], cause: int) -> None:
    """Catches a job whose end is blamed on who noticed it."""
    seen = [launch._Fall(order, rank, code) for order, (rank, code) in enumerate(falls)]
    assert min(seen, key=lambda fall: fall.likelihood).rank == cause


@dataclass
class Ends:
    """A rank that ends with `code`, `polls` looks from now."""

    code: int
    polls: int

    def poll(self) -> int | None:
        self.polls -= 1
        return None if self.polls >= 0 else self.code


@pytest.mark.parametrize(("code", "of_other"), [(2, 2), (3, launch.LOST)])
def test_the_first_rank_is_waited_for(code: int, of_other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a refusal that is said twice, with another exit code, where the first rank takes a second to leave; and a
    rank that lost the first one as the cause."""
    now = iter(range(10_000))
    monkeypatch.setattr("bluejay.cli.launch.time.monotonic", lambda: next(now) / 10)
    monkeypatch.setattr("bluejay.cli.launch.time.sleep", lambda seconds: None)
    ranks: Any = [Ends(code, polls=10), Ends(of_other, polls=0)]
    assert launch._watch(ranks, []) == code


def test_interrupted_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first rank that is ended while it still draws its plot, because another had left before it."""
    now = iter(range(10_000))
    monkeypatch.setattr("bluejay.cli.launch.time.monotonic", lambda: next(now) / 10)
    monkeypatch.setattr("bluejay.cli.launch.time.sleep", lambda seconds: None)
    ranks: Any = [Ends(130, polls=200), Ends(130, polls=0)]
    assert launch._watch(ranks, []) == 130


def test_ends_have_names() -> None:
    """Catches a signal without a name that becomes an error of ours."""
    ends = [launch._how(code) for code in (3, -signal.SIGKILL, -40)]
    assert ends == ["failed with exit code 3", "was killed by SIGKILL", "was killed by signal 40"]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches every rank on the first GPU, and more ranks than GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def device_of(local: int, asked: str) -> str:
        monkeypatch.setattr(launch, "rank_of_launcher", lambda: Rank(local, 3, "127.0.0.1", 1, local=local))
        return launch.device_of_rank(asked)

    assert [device_of(0, "auto"), device_of(1, "cuda"), device_of(1, "cpu")] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="one GPU"):
        device_of(1, "cuda:1")
    with pytest.raises(Exception, match="2 GPUs"):
        device_of(2, "auto")


def test_a_launcher_that_sets_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an unexpected ValueError."""
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK='first'"):
        environment.rank_of_launcher()


def test_the_store_outlives_what_is_read_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slower rank that hears of a lost connection where it was asked something else."""

    class Slow(mesh.PrefixStore):
        def get(self, key: str) -> bytes:
            time.sleep(0.3 if threading.current_thread().name == "1" else 0)
            return super().get(key)

    monkeypatch.setattr(mesh, "PrefixStore", Slow)
    said: dict[int, str] = {}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host, port = listener.getsockname()
        held = listener.detach()

        def join(index: int) -> None:
            rank = Rank(index, 2, host, port, listener=held if index == 0 else None)
            try:
                mesh.join(rank, asked=f"something of {index}", timeout_seconds=10)
            except BluejayError as error:
                said[index] = error.found

        ranks = [threading.Thread(target=join, args=(i,), name=str(i)) for i in (1, 0)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    assert said == dict.fromkeys(range(2), "rank 1 was asked something else than rank 0")


def test_a_layout_without_ranks_is_refused() -> None:
    """Law 10. Catches a whole model on one device where several were asked for."""
    import bluejay

    with pytest.raises(ConfigError, match="no mesh"):
        bluejay.load("nano", layout=Layout(tensor=2), backend="eager")


def test_the_digest_of_files_sees_every_place_it_promises(
    tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks that take another checkpoint under the same name for their own."""
    from bluejay import build

    run = RunConfig(model=str(tiny_checkpoint))
    digests = [digest_of_files(run)]
    weights = tiny_checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    digests.append(digest_of_files(run))
    (tiny_checkpoint / "notes.txt").write_text("")
    digests.append(digest_of_files(run))
    monkeypatch.setattr(build, "WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(build, "HEAD_BYTES", 2000)
    monkeypatch.setattr(build, "SAMPLE_BYTES", 64)
    digests.append(digest_of_files(run))
    weights.write_bytes(whole)  # the last sample ends with the file
    digests.append(digest_of_files(run))
    assert len(set(digests)) == 5
    assert digest_of_files(run) == digests[-1]
