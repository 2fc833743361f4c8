"""Which trajectories of an update make a micro-batch. It follows from their lengths and prompts: every rank makes the
same plan for all, and rows (`train.packing`) of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jetrl.errors import UserError
from jetrl.types import Trajectory

# What one more micro-batch costs, in rows. Computed, not measured: to read and write the FP32 gradient of each weight
# once more, 8 bytes at 4 TB/s, takes as long as its 6 operations for each of 230 rows at 700 TFLOP/s; other costs of a
# pass that do not grow with its rows are taken to be about as much.
_ROWS_OF_A_MICRO_BATCH = 512


def bin_pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in bins whose sums stay within `capacity`; indices ascend in a bin."""
    bins: list[list[int]] = []
    room = _Room(len(lengths), capacity)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sequence of {length} tokens (prompt and completion) does not fit train.max_tokens_per_gpu = "
                f"{capacity}; raise it to at least {length}, or lower task.max_prompt_length or "
                "rollout.max_response_length"
            )
        place = room.take(length)
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
    return [sorted(chosen) for chosen in bins]


class _Room:
    """What is free in `number` bins of `capacity`: a binary tree whose nodes hold the most that is free below them."""

    def __init__(self, number: int, capacity: int) -> None:
        self._leaves = 1 << max(number - 1, 0).bit_length()
        self._free = [capacity] * (2 * self._leaves)

    def take(self, length: int) -> int:
        """The first bin with so much room, which is then taken."""
        free, node = self._free, 1
        while node < self._leaves:
            node = 2 * node if free[2 * node] >= length else 2 * node + 1
        place = node - self._leaves
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
        return place


def share_bins(trajectories: Sequence[Trajectory], bins: list[list[int]], capacity: int) -> list[list[int]]:
    """Bins of `trajectories` for sharing prompts: `bins`, or others that keep families together and cost less.

    A family is packed as one piece, or as few pieces if it does not fit. What a packing costs is its rows, and
    `_ROWS_OF_A_MICRO_BATCH` for each bin: so it is never more than that of `bins` without sharing.
    """
    found = families(trajectories)
    pieces, sizes = [], []
    for members in found:
        shared = shared_rows(trajectories[members[0]])
        own = [trajectories[index].length - shared for index in members]
        for chosen in bin_pack(own, capacity - shared):
            pieces.append([members[place] for place in chosen])
            sizes.append(shared + sum(own[place] for place in chosen))
    together = [sorted(chain.from_iterable(pieces[p] for p in chosen)) for chosen in bin_pack(sizes, capacity)]
    family_of = {index: number for number, members in enumerate(found) for index in members}

    def cost(of: list[list[int]]) -> int:
        """Every trajectory's own rows are computed once anyway; what differs are bins, and stems in them."""
        stems = [{family_of[index]: shared_rows(trajectories[index]) for index in chosen} for chosen in of]
        return sum(_ROWS_OF_A_MICRO_BATCH + sum(rows.values()) for rows in stems)

    return min(together, bins, key=cost)


def families(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The places of trajectories with the same prompt, in the order of first members."""
    found: dict[bytes, list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        found.setdefault(trajectory.segments[0].tokens.tobytes(), []).append(place)
    return list(found.values())


def shared_rows(trajectory: Trajectory) -> int:
    """How many of its rows other trajectories with the same prompt may share."""
    return len(trajectory.segments[0].tokens) - 1
