"""The block of latent attention (MLA): the heads' keys and values are made of one latent for each token.

    q, c', k'  = the projections of the stream; q by way of a latent of its own where there is one
    c          = norm(c')                     [L]       k = rope(k')  [R], one for all heads
    row        = c | k                        [L + R]   all that is kept of a token
    q~         = q_nope W_UK | rope(q_rope)   [L + R]   absorb: W_UK, W_UV are a head's rows of kv_b
    a          = softmax(scale q~ rowᵀ) c     [L]
    y          = o(a W_UVᵀ)                             lift

Every forward pass, rollout and training, computes this absorbed form. The backward pass makes keys c W_UKᵀ | k and
values c W_UVᵀ of the rows again, and is that of the expanded form, which is the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from jetrl.precision.blocks.attention import Attention
from jetrl.precision.blocks.block import Block, Linear, TrainingPass
from jetrl.precision.blocks.states import PerToken, State
from jetrl.precision.formats import BF16, Format
from jetrl.precision.recipe import Role
from jetrl.spec import LatentSpec, ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


LATENT = "latent"


class LatentAttention(Block):
    kind, name = "latent_attention", "attn"
    roundings = {
        **{op: Attention.roundings[op] for op in ("rope", "rope_backward", "cache_read", "concat")},
        "cache_write": "none (a copy)",
        "absorb": "fp32 sums over the head, rounded once to bf16",
        "latent_attention": "fp32 scores over latent and key, exact sums over keys, rounded once to bf16",
        "lift": "fp32 sums over the latent, rounded once to bf16",
        "expand": "fp32 sums over the latent, rounded once to bf16",
        "expanded_backward": "fp32, rounded once to bf16; that of the shared key after a sum over heads",
    }
    formulas = {
        "absorb": "q W_UK | rope", "latent_attention": "softmax(q rowᵀ) c", "lift": "a W_UVᵀ",
        "expand": "c W_UKᵀ | k, c W_UVᵀ",
    }

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        m = latent_of(spec)
        queries = spec.num_heads * m.query
        found = {
            "q_kv_a": Linear(
                (queries if m.query_rank is None else m.query_rank, m.row), spec.hidden_size,
                projections=("q_proj",) if m.query_rank is None else (),
            ),
        }
        if m.query_rank is not None:
            found["q_b"] = Linear((queries,), m.query_rank)
        size = spec.num_heads * m.value
        return found | {"o": Linear((spec.hidden_size,), size, writes_residual=True, projections=("o_proj",))}

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        return {LATENT: PerToken((latent_of(spec).row,))}

    def forward(self, flow: BlockForward, x: str) -> str:
        s, m = flow.spec, latent_of(flow.spec)
        q = projected = flow.linear("q_kv_a", x)
        if m.query_rank is not None:
            q = flow.linear("q_b", flow.norm("q_a_norm", projected, m.eps))
        c, k = flow.norm("kv_a_norm", projected, m.eps), self._rope(flow, "rope_k", projected)
        row = flow.op("row", "concat", {"c": c, "k": k})
        if flow.side == "rollout":
            row = flow.op("row_cache_write", "cache_write", {"x": row})
            row = flow.op("row_cache_read", "cache_read", {"x": row})
        sizes: dict[str, int] = {
            "heads": s.num_heads, "nope": m.nope, "rope": m.rope, "rank": m.rank, "value": m.value
        }
        weight = flow.matrix("kv_b")
        inputs = {"q": q, "rope": self._rope(flow, "rope_q", q), "weight": weight}
        q = flow.op("absorb", "absorb", inputs, BF16, **sizes)
        a = flow.op("attention", "latent_attention", {"q": q, "row": row}, BF16, scale=m.scale(s.rope), **sizes)
        return flow.linear("o", flow.op("lift", "lift", {"x": a, "weight": weight}, BF16, **sizes))

    def _rope(self, flow: BlockForward, name: str, x: str) -> str:
        """Of pairs side by side, which come out apart: the even values, then the odd ones."""
        rope = {k: v for k, v in asdict(flow.spec.rope).items() if k == "theta"}
        if (yarn := flow.spec.rope.yarn) is not None:
            rope |= {f"yarn_{key}": value for key, value in asdict(yarn).items()}
        return flow.op(name, "rope", {"x": x}, interleaved=1, **rope)

    def backward(self, flow: BlockBackward, dy: str) -> str:
        m, q = latent_of(flow.spec), "q_kv_a" if latent_of(flow.spec).query_rank is None else "q_b"
        dy = flow.linear("o", dy, "lift")
        kv = flow.op("kv_b", "expand", {"row": flow.saved("row"), "weight": flow.matrix("kv_b")})
        inputs = {"dy": dy, "y": flow.saved("lift"), "q": flow.saved(q), "rope": flow.saved("rope_q"), "kv": kv}
        d = flow.op("attention.dgrad", "expanded_backward", inputs)
        dc = flow.matrix_gradients("kv_b", d, "kv_a_norm")
        dc = flow.norm("kv_a_norm", dc, flow.saved("q_kv_a"))
        dk = flow.op("rope_k.dgrad", "rope_backward", {"dy": d})
        dq = flow.op("rope_q.dgrad", "rope_backward", {"dy": d})
        if m.query_rank is not None:
            dq = flow.linear("q_b", flow.op("q_b.dy", "concat", {"nope": d, "rope": dq}), "q_a_norm")
            dq = flow.norm("q_a_norm", dq, flow.saved("q_kv_a"))
            parts = {"q": dq, "c": dc, "k": dk}
        else:
            parts = {"nope": d, "rope": dq, "c": dc, "k": dk}
        return flow.linear("q_kv_a", flow.op("q_kv_a.dy", "concat", parts), "attn_norm")

    def saved_bytes(self, of: TrainingPass) -> float:
        """What q_kv_a reads and gives, the queries' own latent and what comes of it, the rotated queries, the row
        before and after its concatenation, the output, which is o's input, and log-sums."""
        s, m = of.spec, latent_of(of.spec)
        queries, output = s.num_heads * m.query, s.num_heads * m.value
        total = of.kept_normed("q_kv_a") + 2 * (2 * queries + 2 * m.row)
        if m.query_rank is not None:
            total += of.kept_input("q_b", m.query_rank) + 2 * (2 * m.query_rank + queries)
        return total + of.kept_input("o", output, elsewhere=True) + 2 * output + 4 * s.num_heads

    def passing_bytes(self, of: TrainingPass) -> int:
        """Expanded keys and values, their gradients and the queries', and before them what absorbs and lifts."""
        s, m = of.spec, latent_of(of.spec)
        expanded = s.num_heads * (2 * m.query + m.value)
        absorbed = s.num_heads * (m.row + 3 * m.rank)  # one chunk's output is in FP32
        return of.tokens * (2 * max(2 * expanded + s.num_heads * m.query, absorbed) + 4 * s.hidden_size)


def latent_of(spec: ModelSpec) -> LatentSpec:
    """The sizes of latent attention of a model that has it."""
    assert spec.latent is not None, f"a family with latent attention, and none in the spec of {spec.family}"
    return spec.latent
