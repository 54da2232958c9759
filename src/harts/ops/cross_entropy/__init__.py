from harts.ops.cross_entropy.api import mapped_log_probs

__all__ = ["mapped_log_probs"]
