"""Products of rows with earlier rows of their chunk, decayed by the gates between them.

The gate differs per channel, so the products are no plain matmul, and dividing by a decay
overflows. Halving meets every pair i > j of a chunk once, i in the second and j in the first half
of one block. Anchored at the middle both factors are at most one, whatever the gate:
exp(gates after the middle up to i) * exp(gates after j up to the middle).

Legend: N chunks times heads, B rows of a chunk (a power of two), K key width,
D width of the gate (K or 1), h rows of a half block, M blocks of 2h rows in a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


def decayed_products(
    q_NBK: torch.Tensor, b_NBK: torch.Tensor, k_NBK: torch.Tensor, log_decay_NBD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower products of q and of b with k, and the decays to both ends of the chunk.

    q, b, k: (N, B, K). log_decay: (N, B, K) or (N, B, 1), at most zero. One floating dtype.
    Returns qk (N, B, B): [n, i, j] = sum over channels of
    q_i k_j exp(log_decay_{j+1} + .. + log_decay_i) for i >= j, else zero;
    bk (N, B, B), likewise for i > j and unspecified elsewhere (so is its gradient);
    from_start (N, B, D), the decay from before the chunk through row i;
    to_end (N, B, D), the decay after row i to the end of the chunk.
    Row i of qk, bk and from_start reads rows up to i only. Time O(N B (K log B + B K)), memory
    O(N B (B + K log B)). Differentiable once.
    """
    qk, bk, from_start, to_end = _DecayedProducts.apply(q_NBK, b_NBK, k_NBK, log_decay_NBD)
    return qk, bk, from_start, to_end


class _DecayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        b: torch.Tensor,
        k: torch.Tensor,
        log_decay: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        num_rows = k.shape[1]
        qk = k.new_zeros(k.shape[0], num_rows, num_rows)
        bk = torch.empty_like(qk)
        qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        from_start = log_decay.exp()
        to_end = torch.ones_like(from_start)
        decays = []
        half = 1
        while half < num_rows:
            left, right = _halves(from_start, half), _halves(to_end, half)
            decay = torch.stack((right[:, :, 0], left[:, :, 1]), dim=2)
            decays.append(decay)
            rows, keys = _factors(q, b, k, decay)
            block = torch.bmm(rows, keys.mT).view(*decay.shape[:4], half)
            _lower_blocks(qk, half).copy_(block[:, :, 0])
            _lower_blocks(bk, half).copy_(block[:, :, 1])
            right[:, :, 0] *= left[:, :, 1, -1:]
            left[:, :, 1] *= left[:, :, 0, -1:]
            half *= 2
        ctx.save_for_backward(q, b, k, from_start, to_end, *decays)
        return qk, bk, from_start, to_end

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_qk: torch.Tensor,
        grad_bk: torch.Tensor,
        grad_start: torch.Tensor,
        grad_end: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        q, b, k, from_start, to_end, *decays = ctx.saved_tensors
        grad_diagonal = grad_qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        grad_q, grad_b, grad_k = grad_diagonal * k, torch.zeros_like(b), grad_diagonal * q
        # Gradients of the sums of gates whose exponentials the decays are.
        sums_left, sums_right = grad_start * from_start, grad_end * to_end
        for decay in reversed(decays):
            half = decay.shape[3]
            left, right = _halves(sums_left, half), _halves(sums_right, half)
            left[:, :, 0, -1] += left[:, :, 1].sum(-2)
            left[:, :, 1, -1] += right[:, :, 0].sum(-2)

            rows, keys = _factors(q, b, k, decay)
            grad_block = torch.stack(
                (_lower_blocks(grad_qk, half), _lower_blocks(grad_bk, half)), dim=2
            ).view(-1, 2 * half, half)
            grad_rows = torch.bmm(grad_block, keys).view(*decay.shape[:4], -1)
            grad_keys = torch.bmm(grad_block.mT, rows).view(*decay.shape[:2], half, -1)
            grad_rows *= decay[:, :, 1:]
            grad_keys *= decay[:, :, 0]

            _halves(grad_q, half)[:, :, 1] += grad_rows[:, :, 0]
            _halves(grad_b, half)[:, :, 1] += grad_rows[:, :, 1]
            _halves(grad_k, half)[:, :, 0] += grad_keys
            _add_dot(left[:, :, 1], grad_rows[:, :, 0], _halves(q, half)[:, :, 1])
            _add_dot(left[:, :, 1], grad_rows[:, :, 1], _halves(b, half)[:, :, 1])
            _add_dot(right[:, :, 0], grad_keys, _halves(k, half)[:, :, 0])
        return grad_q, grad_b, grad_k, sums_left


def _halves(x: torch.Tensor, half: int) -> torch.Tensor:
    """(N, B, W) as (N, M, 2, h, W)."""
    return x.view(x.shape[0], -1, 2, half, x.shape[2])


def _factors(
    q: torch.Tensor, b: torch.Tensor, k: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Second halves of q and b (N*M, 2h, K) and first halves of k (N*M, h, K), decayed."""
    half = decay.shape[3]
    rows = k.new_empty(*decay.shape[:4], k.shape[2])
    torch.mul(_halves(q, half)[:, :, 1], decay[:, :, 1], out=rows[:, :, 0])
    torch.mul(_halves(b, half)[:, :, 1], decay[:, :, 1], out=rows[:, :, 1])
    keys = _halves(k, half)[:, :, 0] * decay[:, :, 0]
    return rows.view(-1, 2 * half, k.shape[2]), keys.reshape(-1, half, k.shape[2])


def _lower_blocks(products: torch.Tensor, half: int) -> torch.Tensor:
    """The blocks (N, M, h, h) of (N, B, B) with rows in second and columns in first halves."""
    num_blocks = products.shape[1] // (2 * half)
    split = products.view(-1, num_blocks, 2, half, num_blocks, 2, half)
    return split[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _add_dot(total: torch.Tensor, grad: torch.Tensor, value: torch.Tensor) -> None:
    """total += grad * value, summed over channels where the gate is one number a row."""
    if total.shape[-1] == grad.shape[-1]:
        total.addcmul_(grad, value)
    else:
        total += (grad * value).sum(-1, keepdim=True)
