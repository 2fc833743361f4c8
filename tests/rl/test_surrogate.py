"""Ratios and surrogates against the papers' and libraries' formulas on padded batches, values and gradients alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.rl.losses import Denominators, policy_loss
from jetrl.rl.surrogate import RATIOS, SURROGATES, Clip, TokenLoss

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
PAIRS = [(r, s) for r in RATIOS for s in SURROGATES if (r, s) != ("sequence", "cispo")]
MAX_LENGTH = 16


class Batch:
    """Sequences with one advantage each, as padded [B, L] for the formulas and as packed [T] for our losses.

    The packed rows are shuffled, and hold masked rows with NaN between them.
    """

    def __init__(self, seed: int, scale: float, num_sequences: int = 6) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 7, (num_sequences,), generator=g)
        self.mask = (torch.arange(6) < self.lengths[:, None]).double()
        shape = (num_sequences, 6)
        self.old = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
        self.new = self.old + torch.randn(shape, generator=g, dtype=torch.float64) * scale
        self.adv = torch.randn(num_sequences, generator=g, dtype=torch.float64)
        order = torch.randperm(num_sequences * 6, generator=g)
        self.rows, self.ids = order, order // 6
        self.active = self.mask.flatten()[order] > 0
        total = int(self.lengths.sum())
        self.den = Denominators(total, num_sequences, tuple(self.lengths.tolist()), MAX_LENGTH)

    def junk(self, values: Tensor) -> Tensor:
        return torch.where(self.active, values.flatten()[self.rows], math.nan)

    def ours(self, padded: Tensor, on_policy: bool = False, rows: Tensor | None = None, **options):
        """`policy_loss` of the packed rows; `padded` [B, L] carries the gradient."""
        keep = slice(None) if rows is None else rows
        bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None, "denominators": self.den}
        adv = self.junk(self.adv[:, None].expand(-1, 6))
        return policy_loss(
            self.junk(padded)[keep], None if on_policy else self.junk(self.old)[keep], adv[keep],
            self.active.float()[keep], self.ids[keep], **(bounds | options),
        )


def aggregate(token_loss: Tensor, mask: Tensor, loss_agg: str) -> Tensor:
    """The four aggregations on a padded matrix, as verl names them; the last one also divided by the sequences."""
    sums = (token_loss * mask).sum(1)
    return {
        "token_mean": sums.sum() / mask.sum(),
        "seq_mean_token_mean": (sums / mask.sum(1)).mean(),
        "seq_mean_token_sum": sums.mean(),
        "seq_mean_token_sum_norm": sums.mean() / MAX_LENGTH,
    }[loss_agg]


def grad_of(function, at: Tensor) -> tuple[Tensor, Tensor]:
    leaf = at.clone().requires_grad_(True)
    value = function(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def assert_same(batch: Batch, formula, **options) -> Tensor:
    """Value and gradient of ours equal those of the formula. Returns which tokens have a gradient, [T] bool."""
    expected, slope = grad_of(formula, batch.new)
    loss, grad = grad_of(lambda leaf: batch.ours(leaf, **options)[0], batch.new)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(grad, slope, rtol=1e-11, atol=1e-14)
    assert not grad[batch.mask == 0].any()
    return slope[batch.mask > 0] != 0


def clip_min(ratio: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


SEEDS = st.integers(0, 10_000)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_gspo_objective_of_the_paper(seed: int):
    """arXiv 2507.18071 eq. 5: one ratio a sequence, differentiated as a whole: exp of the mean log-ratio."""
    batch = Batch(seed, 0.01)

    def paper(new: Tensor) -> Tensor:
        ratio = (((new - batch.old) * batch.mask).sum(1) / batch.mask.sum(1)).exp()
        return clip_min(ratio, batch.adv, 3e-3, 4e-3).mean()

    assert_same(
        batch, paper, ratio="sequence_mean", loss_agg="seq_mean_token_mean", clip_ratio_low=3e-3, clip_ratio_high=4e-3
    )


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_gspo_tokens_as_verl_writes_them(loss_agg: str):
    """verl holds the GSPO-token form, sg(s) * pi / sg(pi), for any aggregation."""
    batch = Batch(3, 0.01)

    def verl(new: Tensor) -> Tensor:
        mean = ((new - batch.old) * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
        ratio = (new - new.detach() + mean.detach()).exp()
        return aggregate(clip_min(ratio, batch.adv[:, None], 3e-3, 4e-3), batch.mask, loss_agg)

    live = assert_same(batch, verl, ratio="sequence_mean", loss_agg=loss_agg, clip_ratio_low=3e-3, clip_ratio_high=4e-3)
    assert live.any() and not live.all(), "the case should hold clipped sequences and others"


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_rloo_loss_of_trl(seed: int):
    """TRL: the mean over sequences of -min(s A, clip(s) A), with s the ratio of whole sequences."""
    batch = Batch(seed, 0.2)

    def trl(new: Tensor) -> Tensor:
        ratio = ((new * batch.mask).sum(1) - (batch.old * batch.mask).sum(1)).exp()
        return clip_min(ratio, batch.adv, 0.2, 0.3).mean()

    assert_same(batch, trl, ratio="sequence", loss_agg="seq_mean_token_mean")


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_whole_sequence_ratio_under_every_aggregation(loss_agg: str):
    """Each token of a sequence has the loss of its whole ratio; autograd goes through the sum itself."""
    batch = Batch(5, 0.6)

    def formula(new: Tensor) -> Tensor:
        ratio = ((new - batch.old) * batch.mask).sum(1, keepdim=True).exp().expand(-1, 6)
        return aggregate(clip_min(ratio, batch.adv[:, None], 0.2, 0.3), batch.mask, loss_agg)

    live = assert_same(batch, formula, ratio="sequence", loss_agg=loss_agg)
    assert live.any() and not live.all(), "the case should hold clipped sequences and others"


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_cispo_of_the_paper_keeps_every_gradient(loss_agg: str):
    """arXiv 2506.13585 eq. 4; the bounds cut weights here, and no token loses its gradient."""
    batch = Batch(7, 0.8)

    def paper(new: Tensor) -> Tensor:
        weight = (new - batch.old).exp().clamp(1 - 0.2, 1 + 0.3).detach()
        return aggregate(-weight * batch.adv[:, None] * new, batch.mask, loss_agg)

    assert assert_same(batch, paper, surrogate="cispo", loss_agg=loss_agg).all()
    _, stats = batch.ours(batch.new, surrogate="cispo", loss_agg=loss_agg)
    ratio = (batch.new - batch.old).exp()[batch.mask > 0]
    for name, cut in (("low", ratio < 0.8), ("high", ratio > 1.3)):
        share = cut.double().mean().item()
        assert share > 0.1 and stats[f"policy/clip_frac_{name}"].item() == pytest.approx(share)
    _, grad = grad_of(lambda leaf: batch.ours(leaf, surrogate="cispo", loss_agg=loss_agg)[0], batch.new)
    assert (grad[batch.mask > 0] != 0).all()


def test_cispo_as_trl_bounds_it():
    """TRL has only the upper bound, as a weight: epsilon_high = 5 is our clip_ratio_low = 1, clip_ratio_high = 4."""
    batch = Batch(8, 1.5)

    def trl(new: Tensor) -> Tensor:
        weight = (new - batch.old).exp().clamp(max=5.0).detach()
        return aggregate(-weight * batch.adv[:, None] * new, batch.mask, "token_mean")

    assert ((batch.new - batch.old).exp() > 5).any()
    assert_same(batch, trl, surrogate="cispo", loss_agg="token_mean", clip_ratio_low=1.0, clip_ratio_high=4.0)


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("dual", [None, 1.5])
def test_token_ratio_as_verl_writes_it(loss_agg: str, dual: float | None):
    batch = Batch(9, 0.5)

    def verl(new: Tensor) -> Tensor:
        adv = batch.adv[:, None]
        token = clip_min((new - batch.old).exp(), adv, 0.2, 0.3)
        if dual is not None:
            token = torch.where(adv < 0, torch.minimum(token, -dual * adv), token)
        return aggregate(token, batch.mask, loss_agg)

    live = assert_same(batch, verl, loss_agg=loss_agg, clip_ratio_c=dual)
    assert live.any() and not live.all(), "the case should hold clipped tokens and others"


def test_sequence_ratios_by_hand():
    # Two sequences: log-ratios ln 2, ln 8 (mean ln 4, sum ln 16) with A = -1, and ln 0.5 with A = 2; clip 0.2, 0.3.
    #   mean: ratio 4: -min(-4, -1.3) = 4; ratio 0.5: -min(1, 1.6) = -1; mean over sequences (4 - 1) / 2 = 1.5
    #   sum: ratio 16: 16; so (16 - 1) / 2 = 7.5
    # gradients: mean: 4 / (2 * 2) each of two tokens, and -1 / 2; sum: 16 / 2 each (of the whole ratio), and -1 / 2
    logprobs = torch.tensor([2.0, 8.0, 0.5], dtype=torch.float64).log().requires_grad_(True)
    old, adv = torch.zeros(3, dtype=torch.float64), torch.tensor([-1.0, -1.0, 2.0], dtype=torch.float64)
    ids, den = torch.tensor([0, 0, 1]), Denominators(3, 2, (2, 1), 4)
    for ratio, value, slope, mean in (("sequence_mean", 1.5, 1.0, 8.5 / 3), ("sequence", 7.5, 8.0, 32.5 / 3)):
        loss, stats = policy_loss(
            logprobs, old, adv, torch.ones(3), ids, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None,
            loss_agg="seq_mean_token_mean", denominators=den, ratio=ratio,
        )
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == pytest.approx(value, rel=1e-12)
        assert grad.tolist() == pytest.approx([slope, slope, -0.5], rel=1e-12)
        assert stats["policy/ratio_mean"].item() == pytest.approx(mean, rel=1e-12)
        assert stats["policy/kl"].item() == pytest.approx(-math.log(8) / 3, rel=1e-12), "of tokens, in either case"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ratio", "surrogate"), PAIRS)
def test_on_policy_gradients(ratio: str, surrogate: str, dtype: torch.dtype):
    """Ratios are exactly 1. Gradient -w A a token; n times that with the ratio of whole sequences."""
    batch = Batch(11, 0.3)
    batch.new = batch.new.to(dtype)
    loss, stats = batch.ours(batch.new, True, ratio=ratio, surrogate=surrogate, loss_agg="seq_mean_token_mean")
    assert stats["policy/ratio_mean"].item() == pytest.approx(1, abs=1e-15) and stats["policy/kl"] == 0
    assert not any(value for key, value in stats.items() if key.startswith("policy/clip_frac")), "or absent"
    options = {"ratio": ratio, "surrogate": surrogate, "loss_agg": "seq_mean_token_mean"}
    _, grad = grad_of(lambda leaf: batch.ours(leaf, True, **options)[0], batch.new)
    count = torch.ones(6, 1) if ratio == "sequence" else batch.lengths[:, None]
    expected = (-batch.adv[:, None] * batch.mask / count / 6).to(dtype)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_surrogate_that_cannot_say_what_it_clips(ratio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TokenLoss` may have None for all three: the loss is the same, and the statistics are absent."""
    usual, batch = SURROGATES["clip"], Batch(11, 0.3)
    loss, stats = batch.ours(batch.new, ratio=ratio, loss_agg="token_mean")
    monkeypatch.setitem(SURROGATES, "clip", lambda *given: TokenLoss(usual(*given).loss, None, None, None))
    same, fewer = batch.ours(batch.new, ratio=ratio, loss_agg="token_mean")
    assert torch.equal(loss, same) and set(stats) - set(fewer) == {
        "policy/clip_frac_low", "policy/clip_frac_high", "policy/clip_frac_dual",
    }
    test_on_policy_gradients(ratio, "clip", torch.float32)


@pytest.mark.parametrize(("ratio", "surrogate"), PAIRS)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, cut=st.integers(1, 5), loss_agg=st.sampled_from(AGGREGATIONS))
def test_micro_batches_add_up(ratio: str, surrogate: str, seed: int, cut: int, loss_agg: str):
    """Loss, gradient and statistics of whole sequences spread over two micro-batches are those of one."""
    batch = Batch(seed, 0.3)
    options = {"ratio": ratio, "surrogate": surrogate, "loss_agg": loss_agg, "clip_ratio_c": 1.4}
    whole = batch.new.clone().requires_grad_(True)
    loss, stats = batch.ours(whole, **options)
    loss.backward()
    parts, total, sums = batch.new.clone().requires_grad_(True), 0.0, dict.fromkeys(stats, 0.0)
    for rows in (batch.ids < cut, batch.ids >= cut):
        part, more = batch.ours(parts, rows=rows, **options)
        part.backward()
        total += part.item()
        sums = {k: sums[k] + more[k].item() for k in stats}
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-14)
    assert sums == pytest.approx({k: v.item() for k, v in stats.items()}, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("ratio", ["sequence_mean", "sequence"])
def test_a_sequence_does_not_see_its_neighbours(ratio: str):
    """Its gradient alone in a micro-batch has the bits that it has among others, in float32."""
    batch = Batch(13, 0.01, num_sequences=8)
    batch.new, batch.old = batch.new.float(), batch.old.float()
    batch.adv = batch.adv.float()
    options = {"ratio": ratio, "loss_agg": "seq_mean_token_mean"}
    _, together = grad_of(lambda leaf: batch.ours(leaf, **options)[0], batch.new)
    for i in range(8):
        _, alone = grad_of(lambda leaf, i=i: batch.ours(leaf, rows=batch.ids == i, **options)[0], batch.new)
        assert torch.equal(alone[i], together[i]) and together[i].any()


def overflow(ratio: str, surrogate: str) -> tuple[float, list[float], dict[str, float]]:
    """Log-ratios of 199, whose exp overflows float32, with A = 1, -1 (cut by the dual clip, if the surrogate has one)
    and 0, and a masked row of infinities: loss, gradients and statistics."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0, math.inf], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([-200.0, -200.0, -200.0, 0.0]), torch.tensor([1.0, -1.0, 0.0, math.nan]),
        torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 1, 2, 2]), clip_ratio_low=0.2, clip_ratio_high=0.3,
        clip_ratio_c=3.0, loss_agg="token_mean", denominators=Denominators(3, 3, (1, 1, 1), 4), ratio=ratio,
        surrogate=surrogate,
    )
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {key: float(value) for key, value in stats.items()}


@pytest.mark.parametrize(("ratio", "surrogate"), PAIRS)
def test_overflow_of_bounded_and_masked_tokens_is_harmless(ratio: str, surrogate: str):
    """What every surrogate must do, whatever its numbers: a ratio beyond float32 leaves loss and gradients finite where
    it is bounded, and has no part in them where A = 0 or the row is masked."""
    loss, grad, stats = overflow(ratio, surrogate)
    assert math.isfinite(loss) and all(map(math.isfinite, grad))
    assert grad[2:] == [0.0, 0.0], "no advantage, and masked"
    assert all(math.isfinite(v) for k, v in stats.items() if k != "policy/ratio_mean")


# The numbers of those that are bounded: loss and gradients of `overflow`.
#   clip: (-1.3 + 3.0) / 3, all constant; cispo: -1.3 A log-prob, 1.3 - 1.3 = 0 and gradients -1.3 A / 3
OVERFLOWS = {"clip": (1.7 / 3, [0.0] * 4), "cispo": (0.0, [-1.3 / 3, 1.3 / 3, 0.0, 0.0])}


@pytest.mark.parametrize(("ratio", "surrogate"), [pair for pair in PAIRS if pair[1] in OVERFLOWS])
def test_bounds_on_a_ratio_that_overflows_by_hand(ratio: str, surrogate: str):
    loss, grad, _ = overflow(ratio, surrogate)
    assert loss == pytest.approx(OVERFLOWS[surrogate][0], abs=1e-7)
    assert grad == pytest.approx(OVERFLOWS[surrogate][1])


def soft(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, active: Tensor, clip: Clip) -> TokenLoss:
    """A bounded gate in the place of clipping, as in SAPO: of slope 1 at ratio 1. It cannot say what is clipped."""
    gate = 4 * torch.sigmoid(torch.exp(log_ratio.clamp(max=20)) - 1)
    return TokenLoss(-advantages * gate, None, None, None)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_new_entry_passes_the_tests_over_the_table(ratio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING.md promises it, also to a surrogate that leaves out all that `TokenLoss` lets it leave out."""
    monkeypatch.setitem(SURROGATES, "soft", soft)
    assert OVER_THE_TABLE == {"test_on_policy_gradients", "test_micro_batches_add_up",
                              "test_overflow_of_bounded_and_masked_tokens_is_harmless"}
    for dtype in (torch.float32, torch.float64):
        test_on_policy_gradients(ratio, "soft", dtype)
    test_micro_batches_add_up(ratio, "soft")
    test_overflow_of_bounded_and_masked_tokens_is_harmless(ratio, "soft")


@pytest.mark.parametrize("ratio", ["sequence_mean", "sequence"])
def test_a_micro_batch_without_loss_rows(ratio: str):
    none, ids = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    loss, stats = policy_loss(
        none, none, none, none.detach(), ids, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None,
        loss_agg="token_mean", denominators=Denominators(3, 1, (3,), 4), ratio=ratio,
    )
    loss.backward()
    assert loss.item() == 0 and set(map(float, stats.values())) == {0.0}


@pytest.mark.parametrize(("ratio", "surrogate"), [("sequence", "cispo"), ("word", "clip"), ("token", "tanh")])
def test_unknown_and_undefined_pairs_are_refused(ratio: str, surrogate: str):
    with pytest.raises(ValueError, match=f'ratio "{ratio}" with surrogate "{surrogate}"'):
        Batch(0, 0.1).ours(torch.zeros(6, 6), ratio=ratio, surrogate=surrogate, loss_agg="token_mean")


OVER_THE_TABLE = {
    name for name, test in list(globals().items()) if name.startswith("test_")
    for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize" and mark.args[1] is PAIRS
}
