"""The reference operators are good enough to train on: memory is linear in rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEP = """
import resource, numpy, harts
tokens = numpy.random.default_rng(0).integers(0, 512, 20_000).tolist()
batch = harts.TrajectoryBatch.from_rows([{"input_ids": tokens, "loss_mask": [0] + [1] * 19_999}])
model = harts.attach(harts.tiny_model("MODEL", vocab_size=512).train())
(microbatch,) = harts.plan_step(batch).microbatches()
model.log_probs(microbatch).log_probs.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_next", pytest.param("bailing_hybrid", marks=pytest.mark.slow)],
)
def test_a_microbatch_of_20000_rows_fits_in_3_gigabytes(model_type: str) -> None:
    """One trajectory, so full attention is at its largest; measured 1.5 to 1.6 GB."""
    result = subprocess.run(
        [sys.executable, "-c", STEP.replace("MODEL", model_type)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    peak_kilobytes = int(result.stdout.split()[-1])
    assert peak_kilobytes < 3e6
