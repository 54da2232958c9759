"""What a layer keeps for backward, and what it computes again there.

"full" keeps a layer's input. "selective" keeps the results of attention besides: at 65,536 rows of
Ling 3 tiny's shape 0.27 GB a layer, for a pass over all visible pairs that does not run again.

With recompute_layers = n the layers after the first n keep everything. Backward starts at the last
layer, so their activations are freed before the first recomputed layer needs room for its own: the
peak is max(kept, one) layers, never their sum. n = layers - 1 therefore costs no more memory than
all layers; every further kept layer costs its activations.

Keeping the outputs of matrix products was left out: in an MoE model almost all bytes are outputs
of matrix products. With Ling 3 tiny's sizes it would take about 70 KB a row and layer, 4.6 GB a
layer at 65,536 rows, as much as keeping the layer.
"""

from __future__ import annotations

from typing import Any

from harts.errors import ConfigError
from harts.ops.kept_results import keep_attention
from harts.train.options import TrainOptions


def set_recomputation(model: Any, options: TrainOptions) -> None:
    """Switch it on in a transformers model, in place; gradients keep their bits on CPU.

    ConfigError where train.recompute_layers leaves no layer to keep.
    """
    if options.recompute == "none":
        return
    # not reentrant: router logits must keep their graph for the MoE losses
    checkpoint: dict[str, Any] = {"use_reentrant": False}
    if options.recompute == "selective":
        checkpoint["context_fn"] = keep_attention
    new_name = getattr(model, "activation_checkpointing_enable", None)  # the newer one
    (new_name or model.gradient_checkpointing_enable)(checkpoint)
    if options.recompute_layers is None:
        return
    layers = _layers(model)
    if options.recompute_layers >= len(layers):
        raise ConfigError(
            f"train.recompute_layers is {options.recompute_layers}, the model has {len(layers)} "
            "layers; give fewer, or leave it out to recompute all of them"
        )
    for layer in layers[options.recompute_layers :]:
        layer.gradient_checkpointing = False


def _layers(model: Any) -> list[Any]:
    """The decoder layers in the order in which they run."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
