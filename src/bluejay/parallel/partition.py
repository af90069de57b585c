"""Sharing out layers over stages: pure functions from numbers to numbers."""

from __future__ import annotations

from collections.abc import Sequence

from bluejay.errors import ConfigError


def share_layers(num_layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage when -1 takes an even share of the rest and the last -1 takes the remainder too.

    Raises:
        ConfigError: the numbers add up to something else; the nearest split that works is named.
    """
    fixed = sum(n for n in counts if n >= 0)
    wild = [i for i, n in enumerate(counts) if n < 0]
    rest = num_layers - fixed
    shares = list(counts)
    if wild and rest >= len(wild):
        for i in wild:
            shares[i] = rest // len(wild)
        shares[wild[-1]] += rest % len(wild)
    elif wild or rest:
        least = f" and at least 1 for each of {len(wild)} shares" if wild else ""
        raise ConfigError(
            asked=f"layers_per_device={list(counts)} for {num_layers} layers",
            found=f"it adds up to {fixed}{least}",
            rule=f"every one of the {num_layers} layers is on exactly one stage",
            fix=f"use {list(nearest_shares(num_layers, counts))}, or -1 for the stages that share the rest",
        )
    if hollow := [i for i, n in enumerate(shares) if n == 0 and 0 < i < len(shares) - 1]:
        raise ConfigError(
            asked=f"layers_per_device={list(counts)}",
            found=f"no layer on stage {hollow[0]}",
            rule="only the first stage (embedding) and the last (head) have work without layers",
            fix=f"use {list(even_shares(num_layers, len(shares)))}, or fewer stages",
        )
    return tuple(shares)


def nearest_shares(num_layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """`num_layers` shared out in proportion to `counts` (-1 counts as the mean), by largest remainder."""
    known = [n for n in counts if n >= 0]
    mean = sum(known) / len(known) if any(known) else 1.0
    weights = [float(n) if n >= 0 else mean for n in counts]
    if not any(weights):
        return even_shares(num_layers, len(counts))
    scale = num_layers / sum(weights)
    shares = [int(weight * scale + 1e-9) for weight in weights]
    by_remainder = sorted(range(len(counts)), key=lambda i: shares[i] - weights[i] * scale)
    for i in by_remainder[: num_layers - sum(shares)]:
        shares[i] += 1
    return even_shares(num_layers, len(counts)) if 0 in shares[1:-1] else tuple(shares)


def even_shares(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As equal as whole numbers allow, the larger shares first."""
    share, more = divmod(num_layers, num_stages)
    return tuple(share + (i < more) for i in range(num_stages))


def balance(num_layers: int, layer_cost: float, extras: Sequence[float], most: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of each stage such that the slowest is as fast as possible, or None when they do not fit.

    Handing out one layer after the other, each to the stage that then costs least, is optimal because all layers cost
    the same: no stage ever gets a layer while another one would have ended up lower with it.

    Args:
        extras: what each stage costs without layers: the first has the embedding, the last the head.
        most: layers that each stage's memory holds.
    """
    shares = [0] * len(extras)
    for _ in range(num_layers):
        open_stages = [i for i in range(len(extras)) if shares[i] < most[i]]
        if not open_stages:
            return None
        chosen = min(open_stages, key=lambda i: (extras[i] + (shares[i] + 1) * layer_cost, i))
        shares[chosen] += 1
    return tuple(shares)


def rows_at_once(num_rows: int, num_stages: int) -> int:
    """Rows that go through a pipeline together: the most that leave every stage a group of equally many to work on."""
    wanted = min(num_rows, num_stages)
    return max(size for size in range(1, num_rows + 1) if num_rows % size == 0 and num_rows // size >= wanted)
