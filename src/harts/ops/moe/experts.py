"""The experts on GPU: two grouped matmuls around SwiGLU, and each row's pairs combined.

Passes at C = 65,536, K = 8, D = 1,536, I = 512 in bfloat16 (M = 524,288 pairs), GB read + written;
in brackets what `copied_rows` adds for a copy of the row of every pair, where `quack065` gathers:

    forward                                 backward
    [copy rows            0.2 + 1.6]        [copy d_output           0.2 + 1.6]
    gate_up matmul        1.6 + 1.07        d_act matmul             1.6 + 0.54
    weighted SwiGLU       1.07 + 0.54       SwiGLU gradients         1.61 + 1.61
    down matmul           0.54 + 1.6        d_down matmul            1.6 + 0.54 read
    combine               1.6 + 0.2         [copy rows again         0.2 + 1.6]
                                            d_gate_up matmul         1.07 + 1.6 read
                                            d_rows matmul            1.07 + 1.6
                                            combine                  1.6 + 0.2

The matmuls are 2.5 TFLOP forward and 4.9 backward: they take most of the time.

The forward is two autograd functions so that recomputation can stop between them. The first saves
all that backward needs; the second saves nothing, and its gradient is that of the output, handed
to the first through a receiver without storage. Non-reentrant checkpointing with early stop ends
the recomputation at the last tensor saved, so neither SwiGLU, nor the down matmul, nor the combine
runs twice, whatever saves nothing after them.

Legend: C rows, D hidden width, E experts, K experts a row, M pairs in expert order, I width of an
expert, O = 2 I.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.moe import copied_rows
from harts.ops.moe.permutation import PairPlan, combine_rows, plan_pairs
from harts.ops.moe.swiglu_kernels import weighted_swiglu, weighted_swiglu_gradients


class Products(Protocol):
    """The matrix products over pairs in expert order; a module that holds these functions.

    `rows` are what rows_of_pairs gives, or in `times` a tensor (M, D). N is another width. Results
    have the dtype of the operands; an expert without rows has outer products of exactly zero.
    """

    def rows_of_pairs(self, rows_CD: torch.Tensor, plan: PairPlan) -> Any:
        """The row of every pair, as the other functions take them."""

    def times(self, rows: Any, weights_EDN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """(M, N): each row times the weights of its pair's expert."""

    def outer(self, rows: Any, others_MN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """(E, D, N): the sum of row^T other over the pairs of each expert."""

    def transposed_outer(self, rows: Any, others_MN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """(E, N, D): the sum of other^T row."""


def products_of(impl: str) -> Products:
    """Of "grouped" or "gathered". Raises ConfigError where the package is missing."""
    if impl == "gathered":
        from harts.ops.moe import quack065

        return quack065
    return copied_rows


def check_limits(
    impl: str, hidden: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor
) -> None:
    """Raise ConfigError where the grouped matmuls would refuse or wait for the device."""
    if impl == "grouped" and not hasattr(F, "grouped_mm"):
        raise ConfigError(
            f"moe_experts: impl 'grouped' needs torch.nn.functional.grouped_mm, torch "
            f"{torch.__version__} has none; install torch 2.10 or newer"
        )
    if impl == "gathered" and torch.cuda.get_device_capability(hidden.device)[0] != 9:
        raise ConfigError(
            "moe_experts: impl 'gathered' is fitted to compute capability 9 (Hopper), got "
            f"{torch.cuda.get_device_name(hidden.device)}; use impl 'grouped', for a model attach "
            "it with experts='grouped'"
        )
    for name, x in dict(hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj).items():
        if x.dtype != torch.bfloat16:
            raise ConfigError(
                f"moe_experts: impl {impl!r} takes bfloat16, {name} is {x.dtype}; load the model "
                "in bfloat16 or attach it with experts='eager'"
            )
    num_experts, width, inner = down_proj.shape
    if width % 8 != 0 or inner % 8 != 0 or num_experts > 1023:
        raise ConfigError(
            f"moe_experts: impl {impl!r} needs widths that are multiples of 8 and at most 1,023 "
            f"experts, got {width}, {inner} and {num_experts}"
        )


def moe_experts(
    hidden_CD: torch.Tensor,
    indices_CK: torch.Tensor,
    weights_CK: torch.Tensor,
    gate_up_EOD: torch.Tensor,
    down_EDI: torch.Tensor,
    products: Products,
) -> torch.Tensor:
    """(C, D) in the dtype of the rows."""
    plan = plan_pairs(indices_CK, gate_up_EOD.shape[0])
    receiver, gate_up_MO = _UpHalf.apply(
        products, hidden_CD, weights_CK, gate_up_EOD, down_EDI, *plan
    )
    output: torch.Tensor = _DownHalf.apply(
        products, receiver, gate_up_MO, weights_CK.detach(), down_EDI.detach(), *plan
    )
    return output


class _UpHalf(torch.autograd.Function):
    """Rows to gate_up. Its backward is that of the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        *tensors_of_plan: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = PairPlan(*tensors_of_plan)
        hidden, weights = hidden.contiguous(), weights.contiguous()
        rows = products.rows_of_pairs(hidden, plan)
        gate_up = products.times(rows, gate_up_proj.transpose(1, 2), plan)
        receiver = hidden.new_empty(()).expand(hidden.shape)
        ctx.products = products
        ctx.save_for_backward(hidden, weights, gate_up_proj, down_proj, gate_up, *plan)
        ctx.mark_non_differentiable(gate_up)
        ctx.set_materialize_grads(False)
        return receiver, gate_up

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        no_gradients = (None,) * len(PairPlan._fields)
        if d_output is None:
            return (None,) * 5 + no_gradients
        hidden, weights, gate_up_proj, down_proj, gate_up, *tensors_of_plan = ctx.saved_tensors
        products, plan = ctx.products, PairPlan(*tensors_of_plan)
        _, want_hidden, _, want_gate_up, want_down = ctx.needs_input_grad[:5]
        d_hidden = d_gate_up_proj = d_down_proj = None

        d_rows = products.rows_of_pairs(d_output, plan)
        d_act = products.times(d_rows, down_proj, plan)
        d_gate_up, d_weights, act = weighted_swiglu_gradients(
            gate_up, weights, plan.pair_of_position, d_act
        )
        del d_act
        if want_down:
            d_down_proj = products.outer(d_rows, act, plan)
        del d_rows, act
        if want_gate_up:
            rows = products.rows_of_pairs(hidden, plan)
            d_gate_up_proj = products.transposed_outer(rows, d_gate_up, plan)
            del rows
        if want_hidden:
            d_rows = products.times(d_gate_up, gate_up_proj, plan)
            d_hidden = combine_rows(d_rows, plan.position_of_pair, weights.shape[1])
        return None, d_hidden, d_weights, d_gate_up_proj, d_down_proj, *no_gradients


class _DownHalf(torch.autograd.Function):
    """gate_up to the output; saves nothing, hands its gradient to the receiver."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        receiver: torch.Tensor,
        gate_up: torch.Tensor,
        weights: torch.Tensor,
        down_proj: torch.Tensor,
        *tensors_of_plan: torch.Tensor,
    ) -> torch.Tensor:
        plan = PairPlan(*tensors_of_plan)
        act = weighted_swiglu(gate_up, weights.contiguous(), plan.pair_of_position)
        rows = products.times(act, down_proj.transpose(1, 2), plan)
        ctx.set_materialize_grads(False)
        return combine_rows(rows, plan.position_of_pair, weights.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, d_output, *(None,) * (3 + len(PairPlan._fields))
