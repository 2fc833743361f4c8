"""`DepthRule`: how many tokens to draft in a step, from measured acceptance and measured times of steps. No torch.

With depth k a step of B sequences computes B * (k + 1) rows and gives each sequence 1 + (accepted drafts) tokens. So it
pays if

    E(k) / cost(B, k) > 1,    E(k) = 1 + sum over sources s of share(s) * sum_{j <= k} prod_{i <= j} rate(s, i)

share(s) is the share of sequences whose draft is from source s, rate(s, i) how often its i-th draft holds where the
first i - 1 held; both are running averages. cost(B, k) is the time of a step relative to one without drafts: measured
where such steps have run, else the model `cost_of_rows`. Acceptance is measured without computing a single draft: the
drafts that would have been made before a plain burst are compared with what the burst drew. So drafts that are never
accepted cost those comparisons, which come the less often the less they promise. No choice of depth changes a bit.

Greedy batches have averages of their own: an evaluation asks the same problems again and answers most of them as
before, which says nothing about drafts for what is drawn.
"""

from __future__ import annotations

import numpy as np

DEPTHS = (0, 1, 3, 7)
MARGIN = 1.03  # what drafts must promise: measured times vary
_WINDOW = 2048.0  # drafts that the averages remember
_PRIOR = 8.0  # drafts that count as rejected before anything is known
_FREE_ROWS = 16  # with so few rows, a step's time is that of reading the weights
_ROWS_OF_WEIGHTS = 192  # so many further rows take the time of reading the weights again
_OVERHEAD = 0.04  # of a step: making drafts, and the attention of more rows
_MAX_PAUSE = 32  # bursts between two comparisons that promise nothing
_MAX_AGE = 256  # bursts for which a measured time counts: contexts grow, and one may have been slow by chance


def cost_of_rows(batch: int, depth: int) -> float:
    """The model: a step's time with drafts relative to that without, before it has been measured."""
    if not depth:
        return 1.0

    def rows_time(rows: int) -> float:
        return 1.0 + max(rows - _FREE_ROWS, 0) / _ROWS_OF_WEIGHTS

    return rows_time(batch * (depth + 1)) / rows_time(batch) + _OVERHEAD


class Acceptance:
    """Running averages of what became of drafts, by source; and how many bursts to wait between two comparisons."""

    def __init__(self, sources: int, deepest: int) -> None:
        self.asked = 0.0  # sequences that drafts were looked for
        self.found = np.zeros(sources)  # those that got one
        self.tried = np.zeros((sources, deepest))  # whose first i drafts held, and that had one more
        self.held = np.zeros((sources, deepest))
        self.pause = self.waited = 0

    def add(self, source: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """For each sequence: its draft's source (-1: none), how many tokens of it were compared, how many held."""
        self.asked += len(source)
        for s in range(len(self.found)):
            mine = (source == s) & (drafted > 0)
            places = np.arange(self.tried.shape[1])
            self.found[s] += mine.sum()
            self.tried[s] += ((drafted[mine, None] > places) & (accepted[mine, None] >= places)).sum(0)
            self.held[s] += (accepted[mine, None] > places).sum(0)
        if self.asked > _WINDOW:
            keep = _WINDOW / self.asked
            self.asked *= keep
            self.found, self.tried, self.held = self.found * keep, self.tried * keep, self.held * keep

    def tokens(self, depth: int) -> float:
        """E(depth): the tokens that a step is expected to give a sequence."""
        if not depth or not self.asked:
            return 1.0
        share = self.found / (self.asked + _PRIOR)
        rate = self._rates()[:, :depth]
        return 1.0 + float((share * rate.cumprod(1).sum(1)).sum())

    def _rates(self) -> np.ndarray:
        """Where a place was hardly ever tried, the rate of the one before counts."""
        rates = np.zeros_like(self.held)
        before = np.zeros(len(self.found))
        for i in range(rates.shape[1]):
            before = rates[:, i] = (self.held[:, i] + 2.0 * before) / (self.tried[:, i] + 2.0)
        return rates


class DepthRule:
    """Chooses a depth up to `deepest`. With `always`, drafts are made whether they pay or not (for tests)."""

    def __init__(self, sources: int, deepest: int, always: bool = False) -> None:
        assert 1 <= deepest <= DEPTHS[-1]
        self.depths = [k for k in DEPTHS if k <= deepest]
        self.always = always
        self._kinds = {greedy: Acceptance(sources, DEPTHS[-1]) for greedy in (False, True)}
        self.acceptance = self._kinds[False]
        self.seconds: dict[tuple[int, int], float] = {}  # of a step, by size of the batch and depth
        self._last: dict[tuple[int, int], int] = {}  # the burst in which each kind ran last
        self._bursts = 0

    def begin(self, greedy: bool) -> None:
        """The next burst is of sequences that are all greedy, or not."""
        self.acceptance = self._kinds[greedy]

    def cost(self, batch: int, depth: int) -> float:
        """cost(batch, depth), measured if both steps have been."""
        plain, drafted = self._recent(_size(batch), 0), self._recent(_size(batch), depth)
        return drafted / plain if plain and drafted else cost_of_rows(batch, depth)

    def _recent(self, size: int, depth: int) -> float | None:
        recent = self._bursts - self._last.get((size, depth), 0) <= _MAX_AGE
        return self.seconds.get((size, depth)) if recent else None

    def choose(self, batch: int, most_rows: int) -> int:
        """The depth for `batch` sequences in steps of at most `most_rows` rows."""
        fits = [k for k in self.depths if not k or batch * (k + 1) <= most_rows]
        if self.always:
            return fits[-1]
        gains = {k: self.acceptance.tokens(k) / self.cost(batch, k) for k in fits}
        best = max(gains, key=lambda k: (gains[k], -k))
        return best if gains[best] > MARGIN else 0

    def compares(self) -> bool:
        """Whether to look for drafts before this plain burst, to compare them with what it draws."""
        found = self.acceptance
        found.waited += 1
        if found.waited <= found.pause:
            return False
        found.waited = 0
        return True

    def compared(self, source: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What became of drafts that were compared but not computed."""
        found = self.acceptance
        found.add(source, drafted, accepted)
        found.pause = 0 if found.tokens(DEPTHS[-1]) > 1.1 else min(2 * found.pause + 1, _MAX_PAUSE)

    def ran(self, batch: int, depth: int, steps: int, seconds: float) -> None:
        """A burst of `steps` steps took `seconds`. The first of a kind may have compiled, so its time is not kept."""
        kind = _size(batch), depth
        is_first, self._bursts = kind not in self._last, self._bursts + 1
        self._last[kind] = self._bursts
        if is_first:
            return
        each, before = seconds / steps, self.seconds.get(kind)
        # a step that compiled something again takes many times as long: it must not rule a depth out for long
        self.seconds[kind] = each if before is None else before + 0.25 * (min(each, 2.0 * before) - before)


def _size(batch: int) -> int:
    """Sizes of batches whose steps count as one kind: powers of two and the middles between them."""
    power = 1 << max(batch - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and batch <= power * 3 // 4 else power
