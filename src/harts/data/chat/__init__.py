"""Chat logs become token trajectories: messages, a template, a tokenizer, one row a turn."""
