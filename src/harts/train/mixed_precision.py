"""MixedPrecisionOptimizer: float32 weights and gradients behind bfloat16 parameters, 16 bytes each.

A bfloat16 weight has 8 significant bits, so an update below 1/512 of it would be lost; the
optimiser must see float32 weights (Micikevicius et al., arXiv 1710.03740, section 3.1), and the
gradients of microbatches must add up in float32. The float32 weight ("master") is kept as the
bfloat16 weight and the 16 bits that rounding took from it, and exists as a whole only while its
own update runs: 2 bytes weight, 2 remainder, 4 gradient sum, 8 moments of AdamW. That is what a
float32 run needs, and 2 less than with a separate copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from harts.errors import CheckpointError

_MASTER_BYTES = 1 << 30

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class MixedPrecisionOptimizer:
    """An optimiser of all trained parameters of a model, whatever their dtypes.

    make_optimizer: builds a torch optimiser for some parameters; it is called once for those that
    are not bfloat16 (in a float32 model: all, and nothing else differs from that optimiser alone)
    and once for every batch of bfloat16 ones, whose masters exist at the same time (at most
    _MASTER_BYTES, or one parameter). Construct it before the first backward pass: it takes over the
    gradients of bfloat16 parameters, whose own `.grad` is None after every backward pass.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._masters = {name: _Master(p) for name, p in trained if p.dtype == torch.bfloat16}
        others = [p for _, p in trained if p.dtype != torch.bfloat16]
        self._batches = _batched(list(self._masters.values()))
        if others or not self._batches:
            self._batches.append([])
        self._optimizers = [
            make_optimizer([master.value for master in batch] or others) for batch in self._batches
        ]
        order = [self._masters[n].value if n in self._masters else p for n, p in trained]
        self._parameters = order  # the model's order, so that norms add up in it

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the float32 gradient sums to a global norm of at most max_norm; returns the norm
        before, a scalar on the device.
        """
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the masters, batch by batch, and round them into the model."""
        for optimizer, batch in zip(self._optimizers, self._batches, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            for master in batch:
                master.join()
            optimizer.step()
            for master in batch:
                master.split()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint beside the model's own weights."""
        remainders = {name: master.remainder for name, master in self._masters.items()}
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"optimizers": states, "remainders": remainders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place; the model must already hold the weights of the same checkpoint.

        CheckpointError where other parameters are bfloat16 than in the checkpoint.
        """
        remainders = state["remainders"]
        differing = sorted(remainders.keys() ^ self._masters.keys())
        if differing:
            raise CheckpointError(
                f"the checkpoint has {len(remainders)} bfloat16 parameters, the model "
                f"{len(self._masters)}, the first that differs is {differing[0]}; resume with "
                "the transformers version of the run"
            )
        for name, master in self._masters.items():
            master.remainder.copy_(remainders[name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class _Master:
    """The float32 weight behind a bfloat16 parameter: value = weight + remainder, exactly.

    Read as integers, the bits of value are 2^16 * weight + remainder, with remainder in
    [-2^15, 2^15): weight is value rounded to nearest, ties away from zero. value's storage is
    empty outside `join` ... `split`; its `.grad` is the float32 sum over backward passes.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.remainder = torch.zeros_like(weight, dtype=torch.int16)
        empty = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        self.value = nn.Parameter(empty)
        self.num_bytes = empty.untyped_storage().nbytes()
        self.value.untyped_storage().resize_(0)
        weight.register_post_accumulate_grad_hook(partial(_add_gradient, self.value))

    def join(self) -> None:
        """Fill value."""
        self.value.untyped_storage().resize_(self.num_bytes)
        low, high = self._halves()
        low.copy_(self.remainder)
        torch.add(self._weight_bits(), self.remainder >> 15, out=high)  # borrow 1 if negative

    def split(self) -> None:
        """Take weight and remainder from value, and free it."""
        low, high = self._halves()
        self.remainder.copy_(low)
        torch.sub(high, self.remainder >> 15, out=self._weight_bits())
        self.value.untyped_storage().resize_(0)

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The low and high 16 bits of value, in place, on a little-endian machine."""
        pairs = self.value.detach().view(torch.int16).unflatten(-1, (-1, 2))
        return pairs[..., 0], pairs[..., 1]

    def _weight_bits(self) -> torch.Tensor:
        return self.weight.detach().view(torch.int16)


def _add_gradient(master: nn.Parameter, weight: torch.Tensor) -> None:
    """The hook: float32 sum += bfloat16 gradient of one backward pass, which is then freed."""
    assert weight.grad is not None, "called after the gradient was accumulated"
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None


def _batched(masters: Sequence[_Master]) -> list[list[_Master]]:
    """Consecutive masters of together at most _MASTER_BYTES, or a single larger one."""
    batches: list[list[_Master]] = []
    room = 0
    for master in masters:
        if not batches or master.num_bytes > room:
            batches.append([])
            room = _MASTER_BYTES
        batches[-1].append(master)
        room -= master.num_bytes
    return batches
