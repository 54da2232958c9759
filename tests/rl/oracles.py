"""Objectives and router losses written as loops over trajectories and expanded tokens."""

import math

import torch


def policy_loss_of_step(
    log_probs, entropies, advantages, old, reference, *, normalisation="token_mean",
    max_length=None, low=0.2, high=0.2, dual=None, kl=0.0, estimator="k3", bonus=0.0,
    level="token",
):  # fmt: skip
    """Loss of a whole step; every argument is a list with one list or tensor a trajectory."""
    scored = [i for i, values in enumerate(log_probs) if len(values)]
    loss = torch.zeros((), dtype=torch.float64)
    for i in scored:
        n = len(log_probs[i])
        trajectory_ratio = None
        if level == "sequence":
            gaps = [log_probs[i][t] - old[i][t] for t in range(n)]
            trajectory_ratio = torch.exp(sum(gaps) / n)
        for t in range(n):
            lp, advantage = log_probs[i][t], advantages[i][t]
            if level == "sequence":
                ratio = trajectory_ratio
            else:
                ratio = torch.exp(lp - (lp.detach() if old is None else old[i][t]))
            inside = min(max(ratio.item(), 1 - low), 1 + high)
            gain = ratio * advantage
            if inside * advantage < gain.item():
                gain = torch.tensor(inside * advantage, dtype=torch.float64)
            if dual is not None and advantage < 0 and gain.item() < dual * advantage:
                gain = torch.tensor(dual * advantage, dtype=torch.float64)
            token = -gain
            if kl:
                gap = lp - reference[i][t]
                token = (
                    token
                    + kl
                    * {
                        "k1": gap,
                        "k2": gap * gap / 2,
                        "k3": torch.exp(-gap) + gap - 1,
                    }[estimator]
                )
            token = token - bonus * entropies[i][t]
            loss = loss + token / denominator(log_probs, i, normalisation, max_length)
    return loss


def nll_of_step(log_probs, weights, *, normalisation="token_mean", max_length=None):
    loss = torch.zeros((), dtype=torch.float64)
    for i, values in enumerate(log_probs):
        for t, lp in enumerate(values):
            loss = loss - weights[i][t] * lp / denominator(log_probs, i, normalisation, max_length)
    return loss


def denominator(log_probs, trajectory, normalisation, max_length):
    scored = sum(1 for values in log_probs if len(values))
    if normalisation == "token_mean":
        return sum(len(values) for values in log_probs)
    if normalisation == "sequence_mean":
        return scored * len(log_probs[trajectory])
    return scored * max_length


def z_loss_of_layer(logits):
    """Mean over expanded tokens (S, E) of logsumexp squared."""
    return sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / len(logits)


def balance_loss_of_layer(logits, indices, kind):
    """Switch loss with f_e / k over expanded tokens (S, E), (S, k)."""
    num_tokens, num_experts = logits.shape
    k = indices.shape[1]
    loss = 0.0
    for e in range(num_experts):
        assigned = sum(1 for row in indices.tolist() for expert in row if expert == e)
        mass = 0.0
        for row in logits:
            if kind == "softmax":
                mass = mass + torch.exp(row[e]) / torch.exp(row).sum()
            else:
                scores = [1 / (1 + torch.exp(-z)) for z in row]
                mass = mass + scores[e] / sum(scores)
        loss = loss + num_experts * (assigned / (num_tokens * k)) * (mass / num_tokens)
    return loss


def group_advantages(rewards, groups, rollouts, epsilon):
    """Advantage of each trajectory; rewards may be None."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        if reward is None:
            advantages.append(0.0)
            continue
        of_rollout = {
            rollout: other
            for other, g, rollout in zip(rewards, groups, rollouts, strict=True)
            if g == group and other is not None
        }
        values = list(of_rollout.values())
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        advantages.append((reward - mean) / (std + epsilon))
    return advantages
