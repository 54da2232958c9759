import pytest

from harts.data.aliases import FIELD_ALIASES, find
from harts.errors import DataError


@pytest.mark.parametrize("canonical", FIELD_ALIASES)
def test_every_alias_finds_its_field_and_the_canonical_name_comes_first(canonical):
    names = FIELD_ALIASES[canonical]
    assert names[0] == canonical
    for name in names:
        assert find(["input_ids", name], canonical) == name
    assert find(["input_ids"], canonical) is None


def test_the_canonical_name_wins_over_aliases():
    fields = {"logprobs": 0, "old_log_probs": 0, "rollout_log_probs": 0}
    assert find(fields, "old_log_probs") == "old_log_probs"
    assert find(fields, "rollout_log_probs") == "rollout_log_probs"


def test_two_aliases_without_the_canonical_name_are_ambiguous():
    with pytest.raises(
        DataError, match="both logprobs and rollout_logprobs could be old_log_probs; keep"
    ):
        find(["rollout_logprobs", "logprobs"], "old_log_probs")


def test_an_unknown_canonical_name_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError):
        find([], "logprobz")
