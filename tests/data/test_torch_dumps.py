"""Dumps of slime and miles: read without torch, only on trust, and never more than data."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from harts.data.formats.torch_pickle import load_torch
from harts.data.read import detect, read
from harts.errors import ConfigError, DataError

torch = pytest.importorskip("torch")

SAMPLE = {
    "tokens": [1, 2, 3, 4, 5],
    "response_length": 3,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-1.0, 0.0, -3.0],
    "reward": 0.5,
    "group_index": 0,
    "index": 0,
    "rollout_id": 7,
    "weight_versions": ["3", "4"],
    "status": "completed",
    "metadata": {},
    "prompt": [{"role": "user", "content": "x"}],
    "response": "y",
    "label": None,
}


def dump(path, *samples, **save):
    torch.save({"rollout_id": 1, "samples": list(samples)}, path, **save)
    return path


@pytest.mark.parametrize("layout", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_dump_is_read_with_trust(tmp_path, layout):
    unscored = {**SAMPLE, "remove_sample": True, "index": 1}
    whole = {**SAMPLE, "loss_mask": None, "tokens": torch.tensor([1, 2, 3, 4, 5]), "index": 2}
    path = dump(tmp_path / "1.pt", SAMPLE, unscored, whole, **layout)
    assert detect(path) == "slime"
    batch = read(path, trust=True)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5] * 3
    masks = batch.loss_mask.reshape(3, 5).astype(int).tolist()
    assert masks == [[0, 0, 1, 0, 1], [0] * 5, [0, 0, 1, 1, 1]]
    assert batch.position_fields["rollout_log_probs"][:5].tolist() == [0, 0, -1, 0, -3]
    assert batch.trajectory_fields["weight_versions"].tolist() == ["4"] * 3
    assert batch.name_of(2) == "trajectory 2 (1.pt sample 2)"


def test_without_trust_a_dump_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"1.pt: a .pt file is a Python pickle, .*trust=True"):
        read(dump(tmp_path / "1.pt", SAMPLE))


def test_expert_routes_are_left_out_with_a_warning(tmp_path):
    routed = {**SAMPLE, "rollout_routed_experts": torch.zeros(4, 2, 2, dtype=torch.int32)}
    with pytest.warns(UserWarning, match="expert routes are not read"):
        read(dump(tmp_path / "1.pt", routed), trust=True)


@pytest.mark.parametrize("layout", [{}, {"_use_new_zipfile_serialization": False}])
def test_tensors_come_back_as_arrays_of_equal_values(tmp_path, layout):
    kinds = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    base = torch.arange(12).reshape(3, 4)
    saved = {kind: base.to(getattr(torch, kind)) for kind in kinds}
    saved |= {"turned": base.T, "part": base[1:, 2:], "empty": base[:0], "scalar": base[1, 1]}
    saved |= {"shared": base.view(-1)[3:], "array": np.arange(3), "number": np.float32(2.5)}
    if not layout:
        saved["bfloat16"] = (base / 7).bfloat16()
    torch.save(saved, tmp_path / "a.pt", **layout)
    loaded = load_torch(tmp_path / "a.pt")
    for name, value in saved.items():
        expected = value.float() if name == "bfloat16" else value
        assert np.array_equal(loaded[name], np.asarray(expected)), name


class Harmful:
    def __reduce__(self):
        return (subprocess.run, (["touch", "harm"],))


@pytest.mark.parametrize("layout", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_pickle_that_names_code_is_refused_and_runs_nothing(tmp_path, layout, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dump(tmp_path / "1.pt", {**SAMPLE, "metadata": Harmful()}, **layout)
    with pytest.raises(DataError, match=r"1.pt: the pickle names subprocess.run; only tensors"):
        read(tmp_path / "1.pt", trust=True)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("layout", [{}, {"_use_new_zipfile_serialization": False}])
def test_every_way_to_cut_or_change_a_dump_is_one_line(tmp_path, layout):
    tensors = {**SAMPLE, "tokens": torch.arange(5)}
    path = dump(tmp_path / "1.pt", tensors, **layout)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for trial in range(150):
        broken = bytearray(content)
        if trial % 2:
            broken = broken[: rng.integers(1, len(content))]
        else:
            broken[rng.integers(len(content))] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(broken))
        try:
            read(path, format="slime", trust=True)
        except DataError as error:
            assert "1.pt" in str(error)
            assert "\n" not in str(error)


def test_what_is_no_dump_is_refused(tmp_path):
    torch.save([1], tmp_path / "1.pt")
    with pytest.raises(DataError, match=r"1.pt: holds a list of 1; give a dict"):
        read(tmp_path / "1.pt", trust=True)
    (tmp_path / "2.pt").write_bytes(pickle.dumps({"samples": []}))
    with pytest.raises(DataError, match=r"2.pt: not a file of torch.save"):
        read(tmp_path / "2.pt", format="slime", trust=True)


def test_reading_a_dump_does_not_import_torch(tmp_path):
    dump(tmp_path / "1.pt", {**SAMPLE, "tokens": torch.arange(5)})
    code = "import sys, harts; harts.read(sys.argv[1], trust=True); print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, str(tmp_path / "1.pt")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
