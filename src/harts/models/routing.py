"""What one MoE router did in a forward pass over compact rows.

Legend: C compact rows, E experts, k experts a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from harts.errors import UnsupportedModelError

RouterKind = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """One router's decisions, one row for each compact row (paper section 3.5).

    name: module path of the router, for messages.
    kind: "softmax" or "sigmoid", how the router turns logits into scores.
    logits: float (C, E), attached to the graph; without any selection bias.
    indices: int64 (C, k), the experts chosen.
    multiplicity: int64 (C,), q_c of Equation 20: semantic positions that map to the row.
    """

    name: str
    kind: RouterKind
    logits: torch.Tensor
    indices: torch.Tensor
    multiplicity: torch.Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.logits, self.indices, self.multiplicity)]
        ranks_fit = [len(shape) for shape in shapes] == [2, 2, 1]
        if not ranks_fit or len({shape[0] for shape in shapes}) != 1:
            raise UnsupportedModelError(
                f"router {self.name}: logits, indices, multiplicity have the shapes "
                f"{shapes[0]}, {shapes[1]}, {shapes[2]}; they must be (C, E), (C, k), (C,)"
            )

    @property
    def num_experts(self) -> int:
        """Experts E."""
        return self.logits.shape[1]

    @property
    def experts_per_row(self) -> int:
        """Experts k that each row is sent to."""
        return self.indices.shape[1]
