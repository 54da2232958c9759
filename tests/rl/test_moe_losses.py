import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import ConfigError, UnsupportedModelError
from harts.models.routing import RouterRecord
from harts.rl.moe_losses import (
    expert_loads,
    load_balancing_loss,
    router_z_loss,
    update_expert_bias,
)
from tests.rl import oracles

E, K = 4, 2


def records_of(logits_by_layer, multiplicity, kind="softmax", k=K):
    return [
        RouterRecord(
            name=f"layers.{layer}.mlp.gate",
            kind=kind,
            logits=logits,
            indices=logits.topk(k).indices,
            multiplicity=multiplicity,
        )
        for layer, logits in enumerate(logits_by_layer)
    ]


def compact_and_expanded(num_layers, multiplicities, seed, kind="softmax"):
    """Records on compact rows, and on rows repeated multiplicity times; both reach the leaves."""
    generator = torch.Generator().manual_seed(seed)
    multiplicity = torch.tensor(multiplicities)
    leaves = [
        torch.randn(len(multiplicities), E, dtype=torch.float64, generator=generator)
        .mul(2)
        .requires_grad_()
        for _ in range(num_layers)
    ]
    expanded = [leaf.repeat_interleave(multiplicity, dim=0) for leaf in leaves]
    ones = torch.ones(len(expanded[0]), dtype=torch.int64)
    return leaves, records_of(leaves, multiplicity, kind), records_of(expanded, ones, kind)


def assert_same(loss, expected, leaves):
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    actual = torch.autograd.grad(loss, leaves, retain_graph=True)
    wanted = torch.autograd.grad(expected, leaves, retain_graph=True)
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


steps = given(
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(0, 1000),
    st.sampled_from(["softmax", "sigmoid"]),
)


@settings(max_examples=30, deadline=None)
@steps
def test_compact_rows_with_multiplicity_equal_the_expanded_rows(layers, multiplicity, seed, kind):
    leaves, compact, expanded = compact_and_expanded(layers, multiplicity, seed, kind)
    assert_same(router_z_loss(compact), router_z_loss(expanded), leaves)
    for scope in ("layer", "model"):
        assert_same(
            load_balancing_loss(compact, scope=scope),
            load_balancing_loss(expanded, scope=scope),
            leaves,
        )
    assert torch.equal(expert_loads(compact), expert_loads(expanded))


@settings(max_examples=15, deadline=None)
@steps
def test_layer_losses_equal_loops_over_the_expanded_tokens(layers, multiplicity, seed, kind):
    leaves, compact, expanded = compact_and_expanded(layers, multiplicity, seed, kind)
    assert_same(
        router_z_loss(compact), sum(oracles.z_loss_of_layer(r.logits) for r in expanded), leaves
    )
    expected = sum(oracles.balance_loss_of_layer(r.logits, r.indices, kind) for r in expanded)
    assert_same(load_balancing_loss(compact), expected, leaves)


@pytest.mark.parametrize("layers", [1, 3])
def test_scope_model_equals_transformers_on_the_expanded_run(layers):
    modeling = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers"
    )
    leaves, compact, expanded = compact_and_expanded(layers, [3, 1, 7, 2], seed=layers)
    ours = load_balancing_loss(compact, scope="model")
    theirs = modeling.load_balancing_loss_func(tuple(r.logits for r in expanded), E, K)
    # transformers sums in float32.
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), rtol=1e-5, atol=1e-8
    )


@settings(max_examples=30, deadline=None)
@steps
def test_losses_with_step_totals_add_over_microbatches(layers, multiplicity, seed, kind):
    leaves, whole, _ = compact_and_expanded(layers, [*multiplicity, 2], seed, kind)
    cut = 1 + seed % len(multiplicity)
    total = sum(multiplicity) + 2
    halves = [
        records_of([leaf[rows] for leaf in leaves], whole[0].multiplicity[rows], kind)
        for rows in (slice(None, cut), slice(cut, None))
    ]
    counts = sum(expert_loads(half) for half in halves)
    assert torch.equal(counts, expert_loads(whole))
    z_loss = sum(router_z_loss(half, total=total) for half in halves)
    assert_same(z_loss, router_z_loss(whole), leaves)
    for scope in ("layer", "model"):
        summed = sum(
            load_balancing_loss(half, scope=scope, total=total, assignment_counts=counts)
            for half in halves
        )
        assert_same(summed, load_balancing_loss(whole, scope=scope), leaves)


def test_own_counts_with_a_step_total_weigh_each_microbatch_by_its_tokens():
    _, records, _ = compact_and_expanded(2, [3, 2], seed=1)
    share = load_balancing_loss(records, total=20)
    torch.testing.assert_close(share, load_balancing_loss(records) * 5 / 20)


def test_balanced_routers_have_loss_one_a_layer_or_k_a_model():
    logits = torch.zeros(4, E, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    record = RouterRecord(
        name="gate",
        kind="softmax",
        logits=logits,
        indices=indices,
        multiplicity=torch.tensor([1, 2, 3, 2]),
    )
    assert load_balancing_loss([record, record]).item() == pytest.approx(2)
    assert load_balancing_loss([record, record], scope="model").item() == pytest.approx(K)


def test_losses_of_half_precision_logits_are_float32():
    logits = torch.randn(3, E, dtype=torch.bfloat16, requires_grad=True)
    (record,) = records_of([logits], torch.tensor([1, 2, 3]))
    assert router_z_loss([record]).dtype == torch.float32
    assert load_balancing_loss([record]).dtype == torch.float32


def test_expert_bias_moves_by_rate_towards_the_mean_load():
    biases = [torch.zeros(3), torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)]
    pointers = [bias.data_ptr() for bias in biases]
    update_expert_bias(biases, torch.tensor([[5, 1, 3], [2, 2, 2]]), rate=0.01)
    torch.testing.assert_close(biases[0], torch.tensor([-0.01, 0.01, 0.0]))
    assert biases[1].tolist() == [0.5, -0.5, 0.0]
    assert [bias.data_ptr() for bias in biases] == pointers


def test_loads_beyond_float32_are_compared_exactly():
    biases = [torch.zeros(2)]
    update_expert_bias(biases, torch.tensor([[2**40 + 1, 2**40 - 1]]), rate=1.0)
    assert biases[0].tolist() == [-1.0, 1.0]


def test_a_frozen_parameter_can_be_updated_while_gradients_are_on():
    bias = torch.nn.Parameter(torch.zeros(2))
    update_expert_bias([bias], torch.tensor([[4, 0]]), rate=0.5)
    assert bias.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("loss", [router_z_loss, load_balancing_loss])
def test_logits_without_graph_are_refused_while_gradients_are_on(loss):
    attached = torch.randn(2, E, requires_grad=True)
    detached = torch.randn(2, E)
    q = torch.tensor([1, 2])
    for layers, name in (([detached], "layers.0"), ([attached, detached], "layers.1")):
        with pytest.raises(ConfigError, match=f"{name}.*use_reentrant=False"):
            loss(records_of(layers, q))
    with torch.no_grad():
        assert loss(records_of([detached], q)).isfinite()
    # Layers below the first trained one, as with adapters on the upper layers only.
    assert loss(records_of([detached, attached], q)).requires_grad


def test_wrong_arguments_are_refused():
    q = torch.tensor([1, 2])
    records = records_of([torch.randn(2, E, requires_grad=True)], q)
    for function in (router_z_loss, load_balancing_loss, expert_loads):
        with pytest.raises(ConfigError, match="no router records"):
            function([])
    with pytest.raises(ConfigError, match="scope is 'token'"):
        load_balancing_loss(records, scope="token")
    with pytest.raises(ConfigError, match="total is 0"):
        router_z_loss(records, total=0)
    counts = expert_loads(records)
    with pytest.raises(ConfigError, match="without total"):
        load_balancing_loss(records, assignment_counts=counts)
    with pytest.raises(ConfigError, match=r"\(1, 3\).*\(1, 4\)"):
        load_balancing_loss(records, total=3, assignment_counts=counts[:, :3])
    wide = records_of([torch.randn(2, E + 1, requires_grad=True)], q)
    with pytest.raises(ConfigError, match="5 experts"):
        expert_loads([*records, *wide])
    with pytest.raises(ConfigError, match="1 expert biases"):
        update_expert_bias([torch.zeros(2)], torch.zeros(2, 2, dtype=torch.int64), rate=0.1)
    with pytest.raises(ConfigError, match="layer 0: the expert bias has the shape"):
        update_expert_bias([torch.zeros(3)], torch.zeros(1, 2, dtype=torch.int64), rate=0.1)
    with pytest.raises(ConfigError, match="keep it float32"):
        update_expert_bias([torch.zeros(2).bfloat16()], torch.tensor([[1, 2]]), rate=0.1)
    with pytest.raises(UnsupportedModelError, match=r"router gate.*\(C, E\)"):
        RouterRecord(
            name="gate",
            kind="softmax",
            logits=torch.zeros(2, E),
            indices=torch.zeros(3, K, dtype=torch.int64),
            multiplicity=q,
        )
