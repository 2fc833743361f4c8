"""The update of one training step: the forward pass of a micro-batch, and all optimizer updates of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.logprob.truncation import Support, Truncation
from jetrl.model.block import Routes
from jetrl.model.critic import Critic
from jetrl.model.master import Master, masters_of
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE, World
from jetrl.rl import losses, mismatch
from jetrl.rl.objective import Inputs, objective
from jetrl.rl.routing import RoutingCounts
from jetrl.rl.routing import merged as merged_counts
from jetrl.rl.top_k import top_k_kl
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.digests import UNSEEN, Digests
from jetrl.train.merging import Part, merged
from jetrl.train.optim import lr_at
from jetrl.train.packing import denominators, to_device
from jetrl.train.routing import Routing
from jetrl.train.token_terms import SHARE, TokenTerms, owns
from jetrl.train.trainer import LossOf, Midway, NonFiniteError, optimizer_step
from jetrl.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Learner:
    """What an update changes and reads. `critic_optimizer` belongs to a separate critic.

    `policy_optimizer` None: nothing is trained, and the model may hold no masters. Model and critic are spread
    over the replicas of `world` (`model.sharding`), which share the batches.
    """

    model: Transformer
    policy_optimizer: torch.optim.Optimizer | None
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    world: World = ALONE

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's optimizer."""
        assert self.policy_optimizer is not None, "this session was built to evaluate"
        return self.policy_optimizer

    def policy_masters(self) -> dict[str, Master]:
        """What the policy's optimizer steps, and what is frozen; a value head that is shared with the policy, too."""
        shared = self.critic if self.critic_optimizer is None else None
        found = masters_of(self.model)
        return found if shared is None else found | {f"critic.{name}": m for name, m in masters_of(shared).items()}

    def optimizers(self) -> list[tuple[str, torch.optim.Optimizer, dict[str, Master]]]:
        """Each optimizer with its name in checkpoints and what it steps."""
        found = [("optimizer", self.optimizer, self.policy_masters())]
        if self.critic_optimizer is not None:
            assert self.critic is not None
            found.append(("critic_optimizer", self.critic_optimizer, masters_of(self.critic)))
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a micro-batch that carry loss, with the learner's values there. All [R] but `hidden` [R, D].
    `support`: what truncated distributions are left with, if they are."""

    index: Tensor
    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor
    support: Support | None = None


def forward_batch(micro: MicroBatch) -> ForwardBatch:
    """The training forward's input."""
    return ForwardBatch(
        micro.tokens, micro.positions, varlen_plan(micro.cu_seqlens, micro.lengths, micro.stems), "train"
    )


def truncation_of(config: Config) -> Truncation | None:
    """How the distributions that the learner learns are truncated; None: not at all."""
    r = config.rollout
    return Truncation(r.top_p, r.top_k, r.min_p) if r.truncates and r.logprobs == "sampled" else None


def forward_rows(
    model: Transformer, micro: MicroBatch, temperature: float, routes: Routes | None = None, keep: bool = True,
    truncation: Truncation | None = None,
) -> Rows:
    """Training forward of one micro-batch; log-probs and entropy of the rows whose target is the policy's token.

    `keep`: see `kernels.logprob.ops.token_logprobs`. With a `truncation` both are of the truncated distributions: of
    the micro-batch's `kept_sets`, or where it has none of those that this model's logits give.
    """
    hidden = model(forward_batch(micro), routes=routes)
    index = micro.loss_mask.nonzero()[:, 0]
    rows, targets = hidden[index], micro.targets[index]
    support = None if truncation is None else Support(truncation, targets, micro.kept_sets)
    logprobs, entropy = model.token_logprobs(rows, targets, temperature, keep, support)
    return Rows(index, logprobs, entropy, rows, support)


Tell = Callable[[str, str], None]
"""Reports to the user what happened in a step, and the detail (`Display.hint`)."""


def update(
    learner: Learner, batches: list[PackedBatch], config: Config, step: int, tell: Tell | None = None,
    before: Callable[[PackedBatch], None] | None = None, seen: Digests = UNSEEN,
) -> dict[str, float]:
    """All optimizer updates of a step, with a publish between two; after the last the caller publishes. Gives metrics.
    `before` is called before each, with the weights that it begins with published. `seen` gets the digests of what the
    updates compute.

    With one update a step the old policy is the current one, so its log-probs are the ones at hand and no extra pass is
    made. With several, the batches hold the old log-probs, or a unified flow takes the rollout's (the same bits).

    `parity/*` compares every update that begins with the weights that sampled: the first with loss tokens, and in the
    critic's warm-up all of them. Of these it compares the tokens that those weights drew. The other metrics are those
    of `merging.merged`.

    A UserError comes before any weight changes, or is a `Midway`.
    """
    parts: list[Part] = []
    compared = Compared(learner.model, config)
    for number, batch in enumerate(batches):
        if batch.num_loss_tokens == 0:  # every trajectory dropped or masked: nothing to learn from
            continue
        if not compared.weights_sampled:
            learner.model.publish()
        try:
            if before is not None:
                before(batch)
            with seen.within("update", number):
                parts.append(_one_update(learner, batch, config, step, compared, len(batches) == 1, tell, seen))
        except UserError as error:  # of a function of the user's
            if not compared.stepped and learner.world.replicas.alone:
                raise
            raise Midway(f"{error} The current step is lost; --resume continues from the newest checkpoint.") from error
        if learner.critic is not None:  # only the trainer reads the critic
            learner.critic.publish()
    if not parts:
        return {}
    return merged(parts, config.rl.loss_agg) | compared.metrics(learner.world.replicas)


@dataclass(slots=True)
class Compared:
    """Learner against rollout over the updates of a step, while the policy's weights are those that sampled."""

    model: Transformer
    config: Config
    weights_sampled: bool = True
    stepped: bool = False  # whether an optimizer has made a step, the policy's or the critic's
    gap: mismatch.MismatchAccumulator = field(default_factory=mismatch.MismatchAccumulator)
    counts: list[RoutingCounts] = field(default_factory=list)  # of each update of the policy, or comparison
    weights: mismatch.SampleSize = field(default_factory=mismatch.SampleSize)

    @torch.no_grad()
    def add(
        self, micro: MicroBatch, rows: Rows, routes: Routes | None, routing: Routing, version: int
    ) -> losses.Terms:
        """The loss rows of a micro-batch, if they can be compared: those that the weights of `version`, which are the
        learner's, drew. Log-probs that are not finite are not: there is then
        a term [R] that is NaN at these rows. It ends the step as any term that is not finite does, also where a
        correction leaves them out of the loss."""
        if not self.weights_sampled:
            return {}
        index = rows.index
        sampled, ids = micro.rollout_logprobs[index], micro.sequence_ids[index]
        finite = rows.logprobs.isfinite() & sampled.isfinite()
        routing.compare(forward_batch(micro), routes, index)
        if bool(finite.all()):
            current = None if micro.versions is None else micro.versions[index] == version
            self.gap.add(rows.logprobs, sampled, current, sequence_ids=ids)
            if self.config.rollout.overcommit:
                self.weights.add(rows.logprobs, sampled)
            return {}
        return {"parity": torch.where(finite, 0.0, math.nan).double()}

    @torch.no_grad()
    def add_batch(self, batch: PackedBatch, shares: losses.Denominators, world: World) -> None:
        """A batch with which the policy makes no update. NonFiniteError where log-probs are not finite. Collective."""
        routing, terms = Routing(self.model, self.config.train, shares), TokenTerms()
        for host in batch.micro_batches:
            micro = to_device(host, self.model.head_weight.device)
            rows = forward_rows(
                self.model, micro, self.config.rollout.temperature, routes := routing.routes(),
                truncation=truncation_of(self.config),
            )
            facts = {"log-prob": rows.logprobs, "in the rollout": micro.rollout_logprobs[rows.index]}
            compared = self.add(micro, rows, routes, routing, batch.weight_version)
            terms.add(compared, micro, rows.index, facts)
        if (largest := terms.largest(world)) is not None:
            raise NonFiniteError(f"log-probs; {largest.named(batch, False)}")
        self.counts.append(routing.counts)

    def metrics(self, world: World) -> dict[str, float]:
        """`parity/*` and the load of experts, over all ranks and updates. Collective."""
        gaps, counts, weights = zip(*world.gather((self.gap, self.counts, self.weights)), strict=True)
        gap, sizes = mismatch.merged(gaps), mismatch.SampleSize()
        for part in weights:
            sizes.merge(part)
        routed = merged_counts([one for of_rank in counts for one in of_rank]).metrics()
        found = gap.metrics() if gap.count else {}
        if sizes.count:
            found |= {"rl/ess": sizes.share, "parity/frac_checked_live": gap.count / sizes.count}
        return found | routed


def _one_update(
    learner: Learner, batch: PackedBatch, config: Config, step: int, compared: Compared, single: bool,
    tell: Tell | None, seen: Digests,
) -> Part:
    shares = denominators(batch, config.rollout.max_response_length, config.rl.masked_sequences)
    stats: dict[str, float] = {}
    if learner.critic_optimizer is not None:
        with seen.within("critic"):
            stats |= _critic_update(learner, batch, config, shares, seen)
        compared.stepped = True
        if step <= config.rl.critic_warmup_steps:
            compared.add_batch(batch, shares, learner.world.replicas)
            return Part(stats, shares)
    stats |= _policy_update(learner, batch, config, step, shares, compared, single, tell, seen)
    compared.weights_sampled, compared.stepped = False, True
    return Part(stats, shares)


def _policy_update(
    learner: Learner, batch: PackedBatch, config: Config, step: int, shares: losses.Denominators, compared: Compared,
    single: bool, tell: Tell | None, seen: Digests,
) -> dict[str, float]:
    model, temperature, terms = learner.model, config.rollout.temperature, TokenTerms()
    routing = Routing(model, config.train, shares)
    shared, truncation = learner.critic if learner.critic_optimizer is None else None, truncation_of(config)
    masters = list(learner.policy_masters().values())

    def loss_of(micro: MicroBatch) -> tuple[Tensor, losses.Stats]:
        keep = not config.rl.entropy_coef  # whether the log-probs alone have a gradient
        rows = forward_rows(model, micro, temperature, routes := routing.routes(), keep, truncation)
        seen.add("logprobs", rows.logprobs)
        unread = compared.add(micro, rows, routes, routing, batch.weight_version) if not micro.given else {}
        values = shared.values(rows.hidden) if shared is not None else None
        inputs, of_tokens = inputs_of(micro, rows, values, single), losses.Terms()
        inputs = with_teacher_kl(model, micro, rows, without_policy(inputs, config) if micro.given else inputs, config)
        loss, part = objective(inputs, config.rl, shares, of_tokens)
        loss = loss if not unread else loss * math.nan
        of_tokens |= unread
        terms.add(of_tokens, micro, rows.index, facts_of(inputs), log_ratio_of(inputs))
        return routing.add_to(loss, part, routes, rows.index, micro.sequence_ids)

    lr = lr_at(step - 1, config.train)
    stats = _named_step(
        learner, config, batch, terms, loss_of, masters, learner.optimizer, lr, tell, seen,
    )
    stats["policy/loss"], stats["policy/grad_norm"], stats["policy/lr"] = stats.pop("loss"), stats.pop("grad_norm"), lr
    compared.counts.append(routing.counts)
    return stats


def _named_step(
    learner: Learner, config: Config, batch: PackedBatch, terms: TokenTerms, loss_of: LossOf,
    masters: list[Master], optimizer: torch.optim.Optimizer, lr: float, tell: Tell | None, seen: Digests,
) -> dict[str, float]:
    """`optimizer_step`; a NonFiniteError names the token whose term is the largest, and so does `tell` where one token
    makes more than half of the update. Collective."""
    whole = config.rl.ratio == "sequence"
    try:
        stats = optimizer_step(
            masters, optimizer, batch, loss_of, lr=lr, max_grad_norm=config.train.max_grad_norm,
            world=learner.world.replicas, reduction=config.train.reduction, lanes=config.train.reduction_lanes,
            seen=seen,
        )
    except NonFiniteError as error:
        largest = terms.largest(learner.world.replicas)
        if largest is None or (math.isfinite(largest.value) and not owns(largest, batch)):
            raise  # no token's term is to blame
        raise NonFiniteError(f"{error}; {largest.named(batch, whole)}") from error
    largest = terms.largest(learner.world.replicas)
    if largest is None:
        return stats
    if tell is not None and owns(largest, batch):
        tell(
            "one token owns the update",
            f"of the sum of all terms' sizes, {largest.share:.0%} is of one token of {batch.num_loss_tokens}: "
            f"{largest.named(batch, whole)}. Clipping by train.max_grad_norm leaves this token's gradient and little "
            "else.",
        )
    return stats | {SHARE: largest.share}


def facts_of(inputs: Inputs) -> dict[str, Tensor | None]:
    """What a message about a token says of it."""
    return {
        "log-prob": inputs.logprobs, "before the step's first update": inputs.old_logprobs,
        "in the rollout": inputs.rollout_logprobs, "in the reference": inputs.ref_logprobs,
        "advantage": inputs.advantages, "value": inputs.values, "return": inputs.returns,
    }


def log_ratio_of(inputs: Inputs) -> Tensor | None:
    """`logprobs - old_logprobs` [R]; None where the old policy is the current one."""
    return None if inputs.old_logprobs is None else inputs.logprobs.detach() - inputs.old_logprobs


def inputs_of(micro: MicroBatch, rows: Rows, values: Tensor | None, single: bool) -> Inputs:
    """The objective's view of a micro-batch: its columns at the rows that carry loss.

    `single`: there is one update, so the old policy is the current one.
    """

    def column(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole[rows.index]

    sampled = micro.rollout_logprobs[rows.index]
    kept = column(micro.old_logprobs)
    assert single or kept is not None or micro.versions is None, "older weights' log-probs are not the old policy's"
    old = None if single else (sampled if kept is None else kept)
    return Inputs(
        logprobs=rows.logprobs, entropy=rows.entropy, advantages=micro.advantages[rows.index],
        rollout_logprobs=sampled, sequence_ids=micro.sequence_ids[rows.index], old_logprobs=old,
        ref_logprobs=column(micro.ref_logprobs), values=values, old_values=column(micro.values),
        returns=column(micro.returns),
    )


def without_policy(inputs: Inputs, config: Config) -> Inputs:
    """The inputs of given answers, as if this policy had drawn them, without advantages: no term but the entropy's has
    a gradient, and statistics count them at ratio 1."""
    own = inputs.logprobs.detach()
    return replace(
        inputs, advantages=torch.zeros_like(own), rollout_logprobs=own,
        old_logprobs=None if inputs.old_logprobs is None else own, ref_logprobs=own if config.rl.kl_coef else None,
    )


def with_teacher_kl(model: Transformer, micro: MicroBatch, rows: Rows, inputs: Inputs, config: Config) -> Inputs:
    """The inputs with the KL to the teacher at each row, where the micro-batch has the teacher's most probable
    tokens."""
    if micro.teacher_tokens is None:
        return inputs
    assert micro.teacher_logprobs is not None, "both columns come from one pass"
    tokens, targets = micro.teacher_tokens[rows.index], micro.targets[rows.index]
    of_policy = model.several_logprobs(rows.hidden, targets, rows.logprobs, tokens, config.rollout.temperature)
    kl = top_k_kl(of_policy, micro.teacher_logprobs[rows.index])
    return replace(inputs, teacher_kl=kl, teacher_weight=config.teacher.weight)


def _critic_update(
    learner: Learner, batch: PackedBatch, config: Config, shares: losses.Denominators, seen: Digests,
) -> dict[str, float]:
    critic, optimizer, rl, terms = learner.critic, learner.critic_optimizer, config.rl, TokenTerms()
    assert critic is not None and optimizer is not None

    def loss_of(micro: MicroBatch) -> tuple[Tensor, losses.Stats]:
        index, of_tokens = micro.loss_mask.nonzero()[:, 0], losses.Terms()
        assert micro.values is not None and micro.returns is not None, "advantages come before the update"
        values, before, returns = critic(forward_batch(micro))[index], micro.values[index], micro.returns[index]
        loss, part = losses.value_loss(
            values, before, returns, torch.ones_like(values), micro.sequence_ids[index],
            value_clip=rl.value_clip, loss_agg=rl.loss_agg, denominators=shares, terms=of_tokens,
        )
        terms.add(of_tokens, micro, index, {"value": values, "return": returns})
        return loss, part

    stats = _named_step(
        learner, config, batch, terms, loss_of, list(masters_of(critic).values()), optimizer, rl.critic_lr, None,
        seen,
    )
    stats.pop(SHARE, None)
    stats["critic/loss"], stats["critic/grad_norm"] = stats.pop("loss"), stats.pop("grad_norm")
    return stats
