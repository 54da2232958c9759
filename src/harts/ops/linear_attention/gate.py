"""The forget gate of KDA: per-channel log decay from a projection, learned rates and offsets.

Two forms are in use: -exp(a) softplus(x + offset), and the bounded ("safe") form
bound * sigmoid(exp(a) (x + offset)) with a negative bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from harts.errors import HartsError

BOUND = -5.0
"""The log decay that fla's and our kernels for bounded gates need a row at least."""


@dataclass(frozen=True)
class KdaGate:
    """log_rate: (G,), a. offset: (G, K). lower_bound: of the bounded form, None for the other."""

    log_rate: torch.Tensor
    offset: torch.Tensor
    lower_bound: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether every decay is at least e^BOUND, which faster kernels rely on."""
        return self.lower_bound is not None and self.lower_bound >= BOUND

    def check(self, raw: torch.Tensor) -> None:
        """Raise HartsError unless the gate fits raw (P, G, K)."""
        shapes = f"log_rate {tuple(self.log_rate.shape)}, offset {tuple(self.offset.shape)}"
        if self.log_rate.shape != raw.shape[1:2] or self.offset.shape != raw.shape[1:]:
            raise HartsError(f"KdaGate: {shapes} do not fit a gate input {tuple(raw.shape)}")
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise HartsError(f"KdaGate: lower_bound is {self.lower_bound}; it must be negative")


def log_decay_of(raw: torch.Tensor, gate: KdaGate) -> torch.Tensor:
    """(P, G, K) log decay, natural logarithm, in the widest dtype given, float32 at least."""
    dtype = torch.promote_types(raw.dtype, torch.promote_types(gate.offset.dtype, torch.float32))
    shifted = raw.to(dtype) + gate.offset.to(dtype)
    rate = gate.log_rate.to(dtype).exp()[:, None]
    if gate.lower_bound is None:
        return -rate * F.softplus(shifted)
    return gate.lower_bound * torch.sigmoid(rate * shifted)
