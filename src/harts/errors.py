"""The errors harts raises on purpose: one line that says what, where, got, want, do."""


class HartsError(ValueError):
    """Base of every error that a user can cause and mend; the command line exits with 2."""


class DataError(HartsError):
    """A rollout file or row that cannot be read exactly as it stands."""


class PlanError(HartsError):
    """A batch that no legal plan exists for under the given options."""


class UnsupportedModelError(HartsError):
    """A model with a part that would mix tokens in a way harts does not understand."""


class ConfigError(HartsError):
    """An option, configuration key or command line that is unknown or has a wrong value."""


class TrainingError(HartsError):
    """A step whose loss or gradients are not finite: nothing was updated."""


class CheckpointError(HartsError):
    """A checkpoint that is missing, incomplete or of another run."""
