"""Random optimisation steps: lists by trajectory for the oracles, flat microbatches for harts."""

from dataclasses import dataclass, field

import numpy as np
import torch

from harts.plan.denominators import Denominators


@dataclass
class Output:
    """Leaves that stand for what a model returns."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


@dataclass
class Step:
    """Scored positions of a step, one float64 leaf (n_i,) a trajectory; n_i may be 0."""

    counts: list[int]
    log_probs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    position_values: dict[str, list[list[float]]]
    advantage: list[float]
    denominators: Denominators = field(init=False)

    def __post_init__(self):
        # One unscored token in front of each trajectory's scored ones.
        mask = [t > 0 for n in self.counts for t in range(n + 1)]
        offsets = np.cumsum([0] + [n + 1 for n in self.counts])
        self.denominators = Denominators.of(np.array(mask), offsets)

    def microbatch(self, trajectories, *, without=()):
        """(out, fields) of some trajectories; gradients reach the step's leaves."""
        chosen = sorted(trajectories)
        counts = [self.counts[i] for i in chosen]
        empty = [torch.zeros(0, dtype=torch.float64, requires_grad=True)]
        out = Output(
            torch.cat(empty + [self.log_probs[i] for i in chosen]),
            torch.cat(empty + [self.entropies[i] for i in chosen]),
        )
        fields = {
            name: np.array([v for i in chosen for v in values[i]], dtype=np.float64)
            for name, values in self.position_values.items()
        }
        fields["advantages"] = np.repeat([self.advantage[i] for i in chosen], counts)
        fields["trajectory_index"] = np.repeat(np.array(chosen, dtype=np.int64), counts)
        fields["position"] = np.array([t + 1 for n in counts for t in range(n)], dtype=np.int64)
        return out, {name: v for name, v in fields.items() if name not in without}

    def leaves(self):
        return [*self.log_probs, *self.entropies]

    def gradients(self, loss):
        grads = torch.autograd.grad(loss, self.leaves(), allow_unused=True)
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(self.leaves(), grads, strict=True)
        ]


def random_step(counts, seed, *, spread=0.4):
    """Old and reference log-probs differ from the current ones by about `spread` nats."""
    rng = np.random.default_rng(seed)

    def leaf(values):
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    current = [-rng.exponential(2.0, n) for n in counts]
    near = {
        name: [(values + rng.normal(0, spread, len(values))).tolist() for values in current]
        for name in ("old_log_probs", "ref_log_probs")
    }
    near["weights"] = [rng.uniform(0, 2, n).tolist() for n in counts]
    return Step(
        counts=list(counts),
        log_probs=[leaf(values) for values in current],
        entropies=[leaf(rng.exponential(1.0, n)) for n in counts],
        position_values=near,
        advantage=rng.normal(0, 1, len(counts)).tolist(),
    )
