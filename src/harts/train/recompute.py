"""Which layers run again in backward instead of keeping their activations.

"selective" recomputes the first n layers and keeps the others. Backward starts at the last layer,
so the kept activations are freed before the first recomputed layer needs room for its own: the
peak is max(kept, one) layers, never their sum. n = layers - 1 therefore costs no more memory than
"full" and saves one layer's forward pass; every further kept layer costs its activations.

The other known meaning, keeping the outputs of matrix products and recomputing the rest of every
layer, was left out. It is a policy on torch's operators, and scans and attention, being autograd
Functions, would be recomputed whatever the policy. And in an MoE model almost all bytes are
outputs of matrix products: with Ling 3 tiny's sizes about 70 KB a row and layer, 4.6 GB a layer
at 65,536 rows, all layers or none.
"""

from __future__ import annotations

from typing import Any

from harts.errors import ConfigError
from harts.train.options import TrainOptions


def set_recomputation(model: Any, options: TrainOptions) -> None:
    """Switch it on in a transformers model, in place; gradients keep their bits on CPU.

    ConfigError where train.recompute_layers leaves no layer to keep.
    """
    if options.recompute == "none":
        return
    # not reentrant: router logits must keep their graph for the MoE losses
    new_name = getattr(model, "activation_checkpointing_enable", None)  # the newer one
    (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if options.recompute_layers is None:
        return
    layers = _layers(model)
    if options.recompute_layers >= len(layers):
        raise ConfigError(
            f"train.recompute_layers is {options.recompute_layers}, the model has {len(layers)} "
            "layers; give fewer, or train.recompute='full'"
        )
    for layer in layers[options.recompute_layers :]:
        layer.gradient_checkpointing = False


def _layers(model: Any) -> list[Any]:
    """The decoder layers in the order in which they run."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
