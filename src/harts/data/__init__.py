"""Rollouts as flat arrays: read, check, write and make them. Imports numpy, never torch."""
