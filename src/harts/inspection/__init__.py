"""What a person wants to know about a rollout file before training; numpy only."""
