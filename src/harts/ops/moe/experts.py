"""The experts on GPU: rows spread to pairs, two grouped matmuls around SwiGLU, pairs combined.

Passes at C = 65,536, K = 8, D = 1,536, I = 512 in bfloat16 (M = 524,288 pairs), GB read + written:

    forward                                 backward
    spread rows           0.2 + 1.6         spread d_output            0.2 + 1.6
    gate_up matmul        1.6 + 1.07        d_act matmul               1.6 + 0.54
    weighted SwiGLU       1.07 + 0.54       SwiGLU gradients           1.61 + 1.61
    down matmul           0.54 + 1.6        d_down matmul              1.6 + 0.54 read
    combine               1.6 + 0.2         spread rows again          0.2 + 1.6
                                            d_gate_up matmul           1.07 + 1.6 read
                                            d_rows matmul              1.07 + 1.6
                                            combine                    1.6 + 0.2

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

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.moe.permutation import combine_rows, plan_pairs, spread_rows
from harts.ops.moe.swiglu_kernels import weighted_swiglu, weighted_swiglu_gradients


def check_limits(hidden: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
    """Raise ConfigError where torch's grouped matmul would refuse or wait for the device."""
    if not hasattr(F, "grouped_mm"):
        raise ConfigError(
            f"moe_experts: impl 'fused' needs torch.nn.functional.grouped_mm, torch "
            f"{torch.__version__} has none; install torch 2.10 or newer"
        )
    for name, x in dict(hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj).items():
        if x.dtype != torch.bfloat16:
            raise ConfigError(
                f"moe_experts: impl 'fused' takes bfloat16, {name} is {x.dtype}; load the model in "
                "bfloat16 or attach it with token_wise='eager'"
            )
    num_experts, width, inner = down_proj.shape
    if width % 8 != 0 or inner % 8 != 0 or num_experts > 1023:
        raise ConfigError(
            f"moe_experts: impl 'fused' needs widths that are multiples of 8 and at most 1,023 "
            f"experts, got {width}, {inner} and {num_experts}"
        )


def moe_experts(
    hidden_CD: torch.Tensor,
    indices_CK: torch.Tensor,
    weights_CK: torch.Tensor,
    gate_up_EOD: torch.Tensor,
    down_EDI: torch.Tensor,
) -> torch.Tensor:
    """(C, D) in the dtype of the rows."""
    plan = plan_pairs(indices_CK, gate_up_EOD.shape[0])
    pairs = (plan.pair_of_position, plan.position_of_pair, plan.expert_ends)
    receiver, gate_up_MO = _UpHalf.apply(hidden_CD, weights_CK, gate_up_EOD, down_EDI, *pairs)
    output: torch.Tensor = _DownHalf.apply(
        receiver, gate_up_MO, weights_CK.detach(), down_EDI.detach(), *pairs
    )
    return output


class _UpHalf(torch.autograd.Function):
    """Rows to gate_up. Its backward is that of the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        pair_of_position: torch.Tensor,
        position_of_pair: torch.Tensor,
        expert_ends: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weights = hidden.contiguous(), weights.contiguous()
        rows = spread_rows(hidden, position_of_pair)
        gate_up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=expert_ends)
        receiver = hidden.new_empty(()).expand(hidden.shape)
        ctx.save_for_backward(
            hidden,
            weights,
            gate_up_proj,
            down_proj,
            gate_up,
            pair_of_position,
            position_of_pair,
            expert_ends,
        )
        ctx.mark_non_differentiable(gate_up)
        ctx.set_materialize_grads(False)
        return receiver, gate_up

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if d_output is None:
            return (None,) * 7
        hidden, weights, gate_up_proj, down_proj, gate_up, pair, position, ends = ctx.saved_tensors
        want_hidden, _, want_gate_up, want_down = ctx.needs_input_grad[:4]
        d_hidden = d_gate_up_proj = d_down_proj = None

        d_rows = spread_rows(d_output, position)
        d_act = F.grouped_mm(d_rows, down_proj, offs=ends)
        d_gate_up, d_weights, act = weighted_swiglu_gradients(gate_up, weights, pair, d_act)
        del d_act
        if want_down:
            d_down_proj = F.grouped_mm(d_rows.t(), act, offs=ends)
        del d_rows, act
        if want_gate_up:
            rows = spread_rows(hidden, position)
            d_gate_up_proj = F.grouped_mm(d_gate_up.t(), rows, offs=ends)
            del rows
        if want_hidden:
            d_rows = F.grouped_mm(d_gate_up, gate_up_proj, offs=ends)
            d_hidden = combine_rows(d_rows, position, weights.shape[1])
        return d_hidden, d_weights, d_gate_up_proj, d_down_proj, None, None, None


class _DownHalf(torch.autograd.Function):
    """gate_up to the output; saves nothing, hands its gradient to the receiver."""

    @staticmethod
    def forward(
        ctx: Any,
        receiver: torch.Tensor,
        gate_up: torch.Tensor,
        weights: torch.Tensor,
        down_proj: torch.Tensor,
        pair_of_position: torch.Tensor,
        position_of_pair: torch.Tensor,
        expert_ends: torch.Tensor,
    ) -> torch.Tensor:
        act = weighted_swiglu(gate_up, weights.contiguous(), pair_of_position)
        rows = F.grouped_mm(act, down_proj.transpose(1, 2), offs=expert_ends)
        ctx.set_materialize_grads(False)
        return combine_rows(rows, position_of_pair, weights.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return d_output, None, None, None, None, None, None
