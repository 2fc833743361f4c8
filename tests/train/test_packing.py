"""Packing: a layout worked by hand, the round trip as a property, refusals."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.errors import UserError
from jetrl.parallel.world import World
from jetrl.rl.losses import policy_loss, token_weights
from jetrl.train import packing
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.bins import bin_pack, share_bins
from jetrl.train.packing import (
    by_trajectory,
    denominators,
    fill,
    held,
    joined,
    pack,
    pack_in_order,
    to_device,
    with_rows,
)
from jetrl.train.reduction import own_numbers, turns_of
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory


def policy(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Segment:
    return Segment("policy", tokens, "", logprobs, spans=((0, 3),) if logprobs else ())


def environment(*tokens: int) -> Segment:
    return Segment("environment", tokens, "")


def answer(segment: Segment, end: str = "stop") -> Trajectory:
    """A plain answer whose prompt `group` fills in."""
    return Trajectory((segment,), end, "flow")


def group(index: int, prompt: tuple[int, ...], answers: tuple[Trajectory, ...], adv: tuple[float, ...]) -> Group:
    whole = tuple(replace(t, segments=(environment(*prompt), *t.segments)) for t in answers)
    return Group(Prompt(index, Problem(str(index), "p", "a"), prompt), whole, adv, adv)


def packed(groups, limit: int = 64, **options) -> list[PackedBatch]:
    batches = pack(groups, max_tokens_per_gpu=limit, flow_digest="flow", weight_version=3, **options)
    return fill(batches, "advantages", [a for g in groups for a in g.advantages])


def there(column: Tensor) -> list[float | None]:
    """A column's numbers; None where there is none."""
    return [None if math.isnan(value) else value for value in column.tolist()]


AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
SHORT = answer(policy((30,), (-0.5,)))
LONG = answer(policy((31, 32, 33), (-1.0, -2.0, -3.0)), "length")
EXAMPLE = [group(0, (10, 11), (SHORT, LONG), (1.5, -1.5)), group(1, (20,), (SHORT, SHORT), (0.25, 0.75))]


@st.composite
def some_groups(draw) -> list[Group]:
    groups = []
    for index in range(draw(st.integers(1, 5))):
        prompt = tuple(range(100, 100 + draw(st.integers(1, 6))))
        answers = []
        for _ in range(draw(st.integers(1, 4))):
            tokens = tuple(draw(st.lists(st.integers(0, 50), min_size=1, max_size=9)))
            logprobs = tuple(-draw(st.integers(1, 64)) / 16 for _ in tokens)
            turns = [policy(tokens, logprobs)]
            for _ in range(draw(st.integers(0, 2))):  # further turns of a conversation
                reply = tuple(draw(st.lists(st.integers(60, 70), min_size=1, max_size=3)))
                more = tuple(draw(st.lists(st.integers(0, 50), min_size=1, max_size=2)))
                turns += [environment(*reply), policy(more, tuple(-draw(st.integers(1, 64)) / 16 for _ in more))]
            answers.append(Trajectory(tuple(turns), draw(st.sampled_from(["stop", "length", "turns"])), "flow"))
        adv = tuple(draw(st.integers(-8, 8)) / 8 for _ in answers)
        groups.append(group(index, prompt, tuple(answers), adv))
    return groups


def test_layout_by_hand():
    (batch,) = packed(EXAMPLE, limit=8)
    # lengths: 3, 5, 2, 2. Longest first into 8: 5 + 3 in the first, then 2 + 2 in the second
    first, second = batch.micro_batches
    assert first.lengths == (3, 5) and second.lengths == (2, 2)
    assert first.tokens.tolist() == [10, 11, 30, 10, 11, 31, 32, 33]
    assert first.targets.tolist() == [11, 30, 0, 11, 31, 32, 33, 0]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first.loss_mask.tolist() == [0, 1, 0, 0, 1, 1, 1, 0]
    assert there(first.advantages) == [None, 1.5, None, None, -1.5, -1.5, -1.5, None]
    assert there(first.rollout_logprobs) == [None, -0.5, None, None, -1, -2, -3, None]
    assert first.sequence_ids.tolist() == [0] * 3 + [1] * 5 and second.sequence_ids.tolist() == [2, 2, 3, 3]
    assert first.cu_seqlens.tolist() == [0, 3, 8] and second.cu_seqlens.tolist() == [0, 2, 4]
    assert (batch.num_sequences, batch.num_loss_tokens) == (4, 6)
    assert (batch.flow_digest, batch.weight_version) == ("flow", 3)
    assert first.tokens.dtype == first.targets.dtype == first.sequence_ids.dtype == first.positions.dtype == torch.int64
    assert first.loss_mask.dtype == first.advantages.dtype == first.rollout_logprobs.dtype == torch.float32
    assert first.cu_seqlens.dtype == torch.int32


@settings(max_examples=60, deadline=None)
@given(some_groups(), st.integers(25, 60), st.integers(1, 4), st.booleans(), st.booleans())
def test_round_trip(groups: list[Group], limit: int, updates: int, mask_truncated: bool, share: bool):
    """Every token of the policy appears exactly once, behind what came before it, with its advantage and log-prob, in
    its group's update; tokens of the environment are in no loss."""
    batches = packed(groups, limit, updates_per_step=updates, mask_truncated=mask_truncated, share_prompts=share)
    found = []
    for batch in batches:
        here, num_loss_tokens = {}, 0
        for micro in batch.micro_batches:
            assert micro.tokens.numel() == sum(micro.lengths) <= limit
            edges, parts = micro.cu_seqlens.tolist(), []
            stems = micro.stems or (-1,) * len(micro.lengths)
            for start, end, stem in zip(edges[:-1], edges[1:], stems, strict=True):
                (number,) = set(micro.sequence_ids[start:end].tolist())
                rows = torch.nonzero(micro.loss_mask[start:end])[:, 0] + start
                before = parts[stem] if stem >= 0 else []
                tokens = micro.tokens[start:end].tolist()
                assert micro.positions[start:end].tolist() == list(range(len(before), len(before) + end - start))
                assert micro.targets[start : end - 1].tolist() == tokens[1:] and micro.loss_mask[end - 1] == 0
                parts.append(before + tokens)
                num_loss_tokens += len(rows)
                if number == -1:
                    assert share and not len(rows) and stem == -1 and stems.count(len(parts) - 1) > 1
                    continue
                assert number not in here
                here[number] = (parts[-1], [(micro.targets[r].item(), micro.advantages[r].item(),
                                             micro.rollout_logprobs[r].item()) for r in rows])
            shared = [tuple(parts[i]) for i in set(stems) - {-1}]
            assert len(set(shared)) == len(shared), "a prompt twice in a micro-batch"
            off = micro.loss_mask == 0
            assert micro.advantages[off].isnan().all() and micro.rollout_logprobs[off].isnan().all()
        assert sorted(here) == list(range(batch.num_sequences))
        assert batch.num_loss_tokens == num_loss_tokens
        found += [here[number] for number in sorted(here)]
    expected = []
    for g in groups:
        for t, adv in zip(g.trajectories, g.advantages, strict=True):
            masked = mask_truncated and t.end != "stop"
            drawn = [pair for s in t.turns for pair in zip(s.tokens.tolist(), s.logprobs.tolist(), strict=True)]
            rows = [(token, adv, lp) for token, lp in drawn]
            expected.append(([token for s in t.segments for token in s.tokens.tolist()], [] if masked else rows))
    assert found == expected, "sequences in the order of the groups, updates one after the other"


def test_shared_prompts_by_hand():
    """Both answers of the first group go on from its prompt's first token; a prompt of one token has no stem."""
    (batch,) = packed(EXAMPLE, limit=16, share_prompts=True)
    (micro,) = batch.micro_batches
    assert micro.lengths == (1, 2, 4, 2, 2) and micro.stems == (-1, 0, 0, -1, -1)
    assert micro.tokens.tolist() == [10, 11, 30, 11, 31, 32, 33, 20, 30, 20, 30]
    assert micro.positions.tolist() == [0, 1, 2, 1, 2, 3, 4, 0, 1, 0, 1]
    assert micro.targets.tolist() == [0, 30, 0, 31, 32, 33, 0, 30, 0, 30, 0]
    assert micro.loss_mask.tolist() == [0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0]
    assert there(micro.advantages) == [None, 1.5, None, -1.5, -1.5, -1.5, None, 0.25, None, 0.75, None]
    assert there(micro.rollout_logprobs) == [None, -0.5, None, -1, -2, -3, None, -0.5, None, -0.5, None]
    assert micro.sequence_ids.tolist() == [-1, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert micro.cu_seqlens.tolist() == [0, 1, 3, 7, 9, 11]
    assert (batch.num_sequences, batch.num_loss_tokens) == (4, 6)
    assert packing.rows_saved([batch]) == {"perf/frac_rows_saved": 1 - 11 / 12}
    (apart,) = packed(EXAMPLE, limit=5, share_prompts=True)  # the first group's answers do not fit together
    assert [m.stems for m in apart.micro_batches] == [(), (), ()] and packing.rows_saved([apart]) == {}


def solutions(prompt: tuple[int, ...], *answers: int) -> list[Trajectory]:
    return [Trajectory((environment(*prompt), policy((1,) * n, ())), "stop", "") for n in answers]


def test_share_bins_by_hand():
    many = solutions((7,) * 400, 100, 100, 100, 100) + solutions((8,) * 600, 50, 50)
    alone = bin_pack([t.length for t in many], 1500)
    assert alone == [[4, 5], [0, 1, 2], [3]]
    # families have 399 + 4 * 101 = 803 and 599 + 2 * 51 = 701 rows: 1504 do not fit 1500, but do fit 1504
    assert share_bins(many, alone, 1500) == [[0, 1, 2, 3], [4, 5]]
    assert share_bins(many, alone, 1504) == [[0, 1, 2, 3, 4, 5]]
    # 399 + 101 * n rows fit 700 with n = 2: the family in two pieces, not in four
    first = many[:4]
    assert share_bins(first, bin_pack([500] * 4, 700), 700) == [[0, 1], [2, 3]]
    # families of 4 + 6 * 96 = 580 rows would be alone in their bins; of whole sequences ten fit, so four bins do
    small = [t for i in range(6) for t in solutions((i,) * 5, 95, 95, 95, 95, 95, 95)]
    alone = bin_pack([t.length for t in small], 1000)
    assert len(alone) == 4 and share_bins(small, alone, 1000) == alone


@pytest.mark.parametrize(
    ("prompt", "limit", "rows", "shared"),
    [(512, 32768, 12288, [8711]), (2048, 32768, 24576, [10247]), (8192, 73728, 73728, [16391]),
     (8192, 16384, 73728, [15366, 9216])],
)
def test_rows_of_docs_memory(prompt: int, limit: int, rows: int, shared: list[int]):
    eight = solutions((1,) * prompt, *[1024] * 8)
    bins = bin_pack([t.length for t in eight], limit)
    assert sum(map(len, bins)) * (prompt + 1024) == rows
    batch = packing.packed(eight, [True] * 8, share_bins(eight, bins, limit), "", 0, share_prompts=True)
    assert [len(m.tokens) for m in batch.micro_batches] == shared


@settings(max_examples=40, deadline=None)
@given(some_groups(), st.integers(25, 60))
def test_sharing_prompts_never_costs_more(groups: list[Group], limit: int):
    (alone,), (shared,) = packed(groups, limit), packed(groups, limit, share_prompts=True)
    rows = [sum(len(m.tokens) for m in b.micro_batches) for b in (alone, shared)]
    bins = [len(b.micro_batches) for b in (alone, shared)]
    assert rows[1] <= rows[0] and rows[1] + 512 * bins[1] <= rows[0] + 512 * bins[0]


@pytest.mark.parametrize(
    ("num_groups", "updates", "sizes"), [(5, 2, [2, 3]), (6, 3, [2, 2, 2]), (2, 4, [1, 1]), (0, 2, [])]
)
def test_updates_split_by_groups(num_groups: int, updates: int, sizes: list[int]):
    groups = [group(i, (i + 1,), (SHORT, SHORT), (1.0, -1.0)) for i in range(num_groups)]
    batches = packed(groups, updates_per_step=updates)
    assert [batch.num_sequences for batch in batches] == [2 * size for size in sizes]
    firsts = [m.tokens[m.positions == 0].tolist() for batch in batches for m in batch.micro_batches]
    assert sum(firsts, []) == [i + 1 for i in range(num_groups) for _ in range(2)]


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_bin_packing(lengths: list[int], capacity: int):
    bins = bin_pack(lengths, capacity)
    assert sorted(sum(bins, [])) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in chosen) <= capacity for chosen in bins)
    # first fit leaves at most one bin half empty, so fewer than twice the least number of bins
    assert len(bins) <= max(1, math.ceil(2 * sum(lengths) / capacity)) if lengths else bins == []


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_bin_packing_is_first_fit(lengths: list[int], capacity: int):
    """By its definition: the longest first, each into the first bin with room."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [chosen for chosen in bins if sum(lengths[i] for i in chosen) + lengths[index] <= capacity]
        (fits[0] if fits else bins.append([]) or bins[-1]).append(index)
    assert bin_pack(lengths, capacity) == [sorted(chosen) for chosen in bins]


def test_bin_packing_by_hand():
    # longest first: 7 | 6 | 4 (does not fit 7: room 3; fits 6: room 4) | 3 into the first | the tie of 3s by index
    assert bin_pack([3, 7, 3, 6, 4], 10) == [[0, 1], [3, 4], [2]]


def test_long_sequence_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"5 tokens .*max_tokens_per_gpu = 4"):
        packed(EXAMPLE, limit=4)


def test_other_flow_and_other_weights_are_refused():
    for wrong, message in (
        (replace(SHORT, flow_digest="bf16"), "precision flow bf16, but the trainer's is flow"),
        (answer(replace(SHORT.segments[0], spans=((0, 2),))), "version 2, but the trainer holds version 3"),
        (answer(replace(LONG.segments[0], spans=((0, 4), (1, 3)))), "of version 4, which are newer than .* version 3"),
        (Trajectory((spans(SHORT.segments[0]), *LONG.segments), "stop", "flow"), "does not say which weights"),
        (answer(replace(SHORT.segments[0], spans=())), "version None, but the trainer holds version 3"),
        (answer(policy((30,), (-0.5, -0.5))), "1 tokens, 2 log-probs"),
        (answer(policy((30,), (math.nan,))), "NaN"),
        (answer(replace(policy((), ()), spans=((0, 3),))), "0 tokens"),
    ):
        bad = group(9, (1,), (SHORT, wrong), (1.0, -1.0))
        with pytest.raises(ValueError, match=f"prompt 9.*{message}"):
            packed([EXAMPLE[0], bad])


def test_groups_without_prompt_or_trajectories_are_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        packed([group(0, (1,), (), ())])
    with pytest.raises(ValueError, match="no tokens"):
        packed([group(0, (), (SHORT,), (1.0,))])
    with pytest.raises(UserError, match="updates_per_step = 0"):
        packed(EXAMPLE, updates_per_step=0)


def test_denominators_by_hand():
    (batch,) = packed(EXAMPLE, limit=8, mask_truncated=True)
    shares = denominators(batch, 9)
    # LONG is truncated and masked: its 3 tokens and its sequence leave the averages
    assert (shares.num_loss_tokens, shares.num_sequences) == (3, 3)
    assert shares.sequence_tokens == (1, 0, 1, 1) and shares.max_response_length == 9


def test_masked_sequences_that_count_by_hand():
    (batch,) = packed(EXAMPLE, limit=8, mask_truncated=True)
    shares = denominators(batch, 9, "count")
    # LONG stays: 4 sequences, and its 3 tokens beside the 3 of the others; statistics are over the 3
    assert (shares.num_loss_tokens, shares.num_sequences, shares.masked_tokens) == (3, 4, 3)
    assert shares.sequence_tokens == (1, 0, 1, 1)
    assert denominators(packed(EXAMPLE)[0], 9, "count") == denominators(packed(EXAMPLE)[0], 9), "nothing is masked"
    weights = {"token_mean": 1 / 6, "seq_mean_token_mean": 1 / 4, "seq_mean_token_sum": 1 / 4}
    for loss_agg, weight in (weights | {"seq_mean_token_sum_norm": 1 / (4 * 9)}).items():
        for micro in batch.micro_batches:
            expected = micro.loss_mask.double() * weight  # the three answers in the loss have one token each
            assert torch.equal(token_weights(micro.loss_mask, micro.sequence_ids, loss_agg, shares), expected)


@settings(max_examples=25, deadline=None)
@given(some_groups())
def test_masked_sequences_as_in_trls_formulas(groups: list[Group]):
    """TRL's losses, written on padded rows [B, L]: its means go over all B rows, and its number of items was counted
    before truncated rows were masked out."""
    (batch,) = packed(groups, 10_000, mask_truncated=True)
    if not batch.num_loss_tokens:
        return
    answers = [t for g in groups for t in g.trajectories]
    advantages = [a for g in groups for a in g.advantages]
    longest, width = 30, max(t.num_policy_tokens for t in answers)
    mask = torch.zeros(len(answers), width, dtype=torch.float64)
    token_loss = torch.zeros(len(answers), width, dtype=torch.float64)
    for i, trajectory in enumerate(answers):
        token_loss[i, : trajectory.num_policy_tokens] = -advantages[i]
        if not trajectory.truncated:
            mask[i, : trajectory.num_policy_tokens] = 1
    items = sum(t.num_policy_tokens for t in answers)
    theirs = {
        "seq_mean_token_mean": ((token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),  # grpo
        "token_mean": (token_loss * mask).sum() / items,  # dapo
        "seq_mean_token_sum_norm": (token_loss * mask).sum() / (len(answers) * longest),  # dr_grpo
    }
    for loss_agg, expected in theirs.items():
        ours = sum(
            policy_loss(
                m.rollout_logprobs.double(), None, m.advantages.double(), m.loss_mask, m.sequence_ids,
                clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=None, loss_agg=loss_agg,
                denominators=denominators(batch, longest, "count"),
            )[0]
            for m in batch.micro_batches
        )
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_an_update_without_loss_tokens_is_visible():
    (batch,) = packed([group(0, (1,), (LONG, LONG), (1.0, -1.0))], mask_truncated=True)
    assert batch.num_loss_tokens == 0 and batch.num_sequences == 2
    with pytest.raises(ValueError, match="nothing to average over"):
        denominators(batch, 9)


@settings(max_examples=25, deadline=None)
@given(some_groups(), st.integers(25, 40), st.sampled_from(AGGREGATIONS), st.booleans())
def test_loss_does_not_depend_on_packing(groups: list[Group], limit: int, loss_agg: str, share: bool):
    """The losses of all micro-batches add up to the same number for any `max_tokens_per_gpu`, prompts shared or not."""

    def total(capacity: int, share: bool) -> float:
        (batch,) = packed(groups, capacity, share_prompts=share)
        shares = denominators(batch, 9)
        return sum(
            policy_loss(
                m.rollout_logprobs.double() * 0.9, m.rollout_logprobs.double(), m.advantages.double(), m.loss_mask,
                m.sequence_ids, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=None, loss_agg=loss_agg,
                denominators=shares,
            )[0].item()
            for m in batch.micro_batches
        )

    assert total(limit, share) == pytest.approx(total(10_000, False), rel=1e-12, abs=1e-13)


def test_a_conversation_by_hand():
    """Two turns of the policy with the environment's tokens 40, 41 between them."""
    talk = Trajectory((policy((30, 31), (-1.0, -2.0)), environment(40, 41), policy((32,), (-3.0,))), "turns", "flow")
    (batch,) = packed([group(0, (10,), (talk, SHORT), (0.5, -0.5))], limit=8)
    (micro,) = batch.micro_batches
    assert micro.tokens.tolist() == [10, 30, 31, 40, 41, 32, 10, 30]
    assert micro.targets.tolist() == [30, 31, 40, 41, 32, 0, 30, 0]
    assert micro.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 0]
    assert there(micro.rollout_logprobs) == [-1, -2, None, None, -3, None, -0.5, None]
    assert batch.num_loss_tokens == 4
    (filled,) = fill([batch], "advantages", [(1.0, 2.0, 3.0), -4.0])
    assert there(filled.micro_batches[0].advantages) == [1, 2, None, None, 3, None, -4, None]
    (masked,) = packed([group(0, (10,), (talk, SHORT), (0.5, -0.5))], limit=8, mask_truncated=True)
    assert masked.micro_batches[0].loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


@settings(max_examples=40, deadline=None)
@given(some_groups(), st.integers(25, 60), st.integers(1, 3), st.booleans(), st.booleans())
def test_columns_of_passes_come_back_by_trajectory(
    groups: list[Group], limit: int, updates: int, mask: bool, share: bool
):
    """What a pass computes for the loss rows is found again, token by token, in the order of the trajectories."""
    batches = packed(groups, limit, updates_per_step=updates, mask_truncated=mask, share_prompts=share)
    rows = [[m.rollout_logprobs[m.loss_mask > 0] * 2 for m in b.micro_batches] for b in batches]
    batches = [with_rows(b, "values", r) for b, r in zip(batches, rows, strict=True)]
    trajectories = [t for g in groups for t in g.trajectories]
    found = by_trajectory([held(batches, "values")], [t.num_policy_tokens for t in trajectories])
    for values, t in zip(found, trajectories, strict=True):
        if mask and t.end != "stop":
            assert values is None, "nothing was computed for it"
        else:
            assert values.tolist() == [2 * lp for s in t.turns for lp in s.logprobs.tolist()]
    for b in fill(batches, "returns", found):
        assert all(there(m.returns) == there(m.values) for m in b.micro_batches)


def test_a_loss_row_without_its_number_is_refused():
    """What was not computed is None, for `fill` as well: it cannot become a 0 in the loss."""
    (batch,) = pack(EXAMPLE, max_tokens_per_gpu=64, flow_digest="flow", weight_version=3)
    assert all(micro.advantages.isnan().all() for micro in batch.micro_batches), "pack has none to give"
    with pytest.raises(AssertionError, match="advantages of a trajectory in the loss was not computed"):
        fill([batch], "advantages", [1.0, None, 1.0, 1.0])
    (batch,) = pack(EXAMPLE, max_tokens_per_gpu=64, flow_digest="flow", weight_version=3, mask_truncated=True)
    (filled,) = fill([batch], "advantages", [1.0, None, 2.0, 3.0])
    assert [a for a in there(filled.micro_batches[0].advantages) if a is not None] == [1.0, 2.0, 3.0]


def assert_equal(one: PackedBatch, other: PackedBatch) -> None:
    for field in fields(PackedBatch):
        if field.name != "micro_batches":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
        for field in fields(MicroBatch):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, Tensor):
                assert x.dtype == y.dtype and torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)), field.name
            else:
                assert x == y, field.name


@settings(max_examples=40, deadline=None)
@given(
    some_groups(), st.integers(25, 60), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(2, 4),
    st.sampled_from([("fast", None), ("fixed", None), ("fixed", 3)]),
)
def test_a_rank_packs_its_share_of_the_whole(groups, limit, updates, mask, share, size, reduction):
    """Its micro-batches are those of the whole packing whose backward passes are its turns; with their columns and the
    values of trajectories, what all ranks hold is the whole. Advantages of single tokens as well."""
    columns = [tuple(i + j / 16 for j in range(t.num_policy_tokens)) for i, t in enumerate(
        t for g in groups for t in g.trajectories
    )]

    def made(own=range) -> list[PackedBatch]:
        batches = pack(
            groups, max_tokens_per_gpu=limit, flow_digest="flow", weight_version=3, updates_per_step=updates,
            mask_truncated=mask, share_prompts=share, own=own,
        )
        rows = [[m.rollout_logprobs[m.loss_mask > 0] / 2 for m in b.micro_batches] for b in batches]
        batches = [with_rows(b, "values", r) for b, r in zip(batches, rows, strict=True)]
        return fill(fill(batches, "advantages", columns), "returns", [float(i) for i in range(len(columns))])

    whole = made()
    parts = [made(own_numbers(World(rank, size, rank), *reduction)) for rank in range(size)]
    for number, batch in enumerate(whole):
        assert batch.numbers == tuple(range(batch.num_micro_batches))
        turns = turns_of(batch.num_micro_batches, {"fast": size}.get(reduction[0], reduction[1] or 99), size)
        for rank, part in enumerate(parts):
            mine = tuple(n for n in batch.numbers if any(turn.micro[rank] == n for turn in turns))
            expected = replace(batch, numbers=mine, micro_batches=tuple(batch.micro_batches[n] for n in mine))
            assert_equal(part[number], expected)
            if part[number].num_loss_tokens:
                assert denominators(part[number], 9) == denominators(batch, 9)
        assert_equal(joined([part[number] for part in parts]), batch)
    lengths = [len(column) for column in columns]
    found = by_trajectory([held(part, "values") for part in parts], lengths)
    for a, b in zip(found, by_trajectory([held(whole, "values")], lengths), strict=True):
        assert (a is None) == (b is None) and (a is None or a.tolist() == b.tolist())


def test_a_log_prob_that_is_no_number_is_refused_by_the_rank_that_packs_it():
    bad = group(9, (1,), (answer(policy((30,) * 5, (-1.0,) * 4 + (math.inf,))), SHORT), (1.0, -1.0))
    packed([bad], limit=6, own=lambda count: [1])
    with pytest.raises(ValueError, match="prompt 9: one of its log-probs is NaN or infinite"):
        packed([bad], limit=6, own=lambda count: [0])


def test_in_order_by_hand():
    """The warm start's packing: neighbours, a new micro-batch where the next does not fit."""
    solved = [Trajectory((environment(*range(n)), policy((9,), ())), "stop", "") for n in (3, 2, 4, 1)]
    batch = pack_in_order(solved, 7)
    assert [m.lengths for m in batch.micro_batches] == [(4, 3), (5, 2)] and batch.num_loss_tokens == 4
    assert batch.micro_batches[1].sequence_ids.tolist() == [2] * 5 + [3] * 2
    assert batch.micro_batches[0].loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert batch.micro_batches[0].rollout_logprobs.isnan().all(), "nobody has sampled a worked solution"
    second = pack_in_order(solved, 7, lambda count: [1])
    assert_equal(second, replace(batch, numbers=(1,), micro_batches=batch.micro_batches[1:]))


def test_to_device_keeps_everything():
    (batch,) = packed(EXAMPLE)
    (micro,) = batch.micro_batches
    moved = to_device(micro, "meta")
    assert moved.tokens.device.type == moved.cu_seqlens.device.type == "meta" and moved.lengths == micro.lengths
    same = to_device(micro, "cpu")
    assert there(same.advantages) == there(micro.advantages) and torch.equal(same.targets, micro.targets)


def spans(segment: Segment, *of: tuple[int, int]) -> Segment:
    return replace(segment, spans=of)


def test_rows_know_which_weights_drew_their_targets_by_hand():
    """An answer of two spans, a conversation whose first turn is older, an answer outside the loss, and a new one."""
    three = policy((31, 32, 33), (-1.0, -2.0, -3.0))
    mixed = answer(spans(three, (0, 1), (1, 2), (2, 3)))
    turns = spans(policy((40,), (-1.0,)), (0, 2)), environment(50, 51), spans(policy((41, 42), (-1.0, -2.0)), (0, 3))
    talk = Trajectory(turns, "stop", "flow")
    cut = answer(spans(three, (0, 2), (1, 3)), "length")
    groups = [group(0, (10, 11), (mixed, cut), (1.0, -1.0)), group(1, (20, 21), (talk, SHORT), (0.5, -0.5))]
    (batch,) = packed(groups, limit=7, mask_truncated=True)
    assert batch.num_older_tokens == 2 + 1 and (batch.num_loss_tokens, batch.num_masked_tokens) == (3 + 3 + 1, 3)
    by_place = {int(m.sequence_ids[0]): m for m in batch.micro_batches}
    assert [by_place[i].versions.tolist() for i in (0, 2)] == [[-1, 1, 2, 3, -1], [-1, 2, -1, -1, 3, 3, -1]]
    assert by_place[1].versions is None, "what is outside the loss is nobody's"
    assert by_place[0].versions.dtype == torch.int64
    (whole,) = packed(groups, limit=64)
    assert whole.num_older_tokens == 3 + 1
    (shared,) = packed(groups, limit=64, share_prompts=True)
    (micro,) = shared.micro_batches
    assert micro.stems and torch.equal(micro.versions >= 0, micro.loss_mask > 0)
    for sequence, expected in enumerate(([1, 2, 3], [2, 3, 3], [2, 3, 3], [3])):
        rows = (micro.sequence_ids == sequence) & (micro.loss_mask > 0)
        assert micro.versions[rows].tolist() == expected
    moved = to_device(micro, "meta")
    assert moved.versions.device.type == "meta"


def test_a_batch_of_one_version_has_no_column_of_versions():
    (batch,) = packed(EXAMPLE, limit=8)
    assert batch.num_older_tokens == 0 and all(m.versions is None for m in batch.micro_batches)


def test_tokens_of_a_trajectory_are_of_the_micro_batch_as_they_were_given():
    """Pieces of segments, where a stem ends within the prompt and its parts begin with the prompt's last token."""
    (batch,) = packed(EXAMPLE, limit=64, share_prompts=True)
    (micro,) = batch.micro_batches
    assert micro.tokens.tolist() == [10, 11, 30, 11, 31, 32, 33, 20, 30, 20, 30] and micro.lengths == (1, 2, 4, 2, 2)
