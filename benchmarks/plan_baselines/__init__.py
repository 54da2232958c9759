"""Planners to compare with: one module each, a function (batch, capacity, replicas) -> StepPlan."""
