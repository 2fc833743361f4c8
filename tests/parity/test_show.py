"""How a certificate is printed: each link, and the first difference where there is one."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from jetrl.parity.certificate import Certificate
from jetrl.parity.rows import LinkResult
from jetrl.parity.show import print_certificate


def printed(*links: LinkResult, ranks: int = 1) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_certificate(Certificate("fp8", "e4m3[1x16,pow2]", "cpu", "a model", 1_400_000, links, ranks), console)
    return console.file.getvalue()


def joined(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def test_a_certificate_and_none() -> None:
    good = LinkResult("a", "alone = packed", 7, 0, 0.0, 0.1, None)
    wrong = LinkResult("d", "graphs = training", 9, 2, 0.25, 0.2, "sequence 1, position 3")
    text = printed(good)
    assert "1.4 M parameters" in text and "KV cache e4m3[1x16,pow2]" in text
    assert "bit-equal: 7 rows of log-probs over the whole vocabulary" in text and "agree bit for bit" in text
    long = printed(replace(good, description="a description " * 9), replace(wrong, first_difference="position 9, " * 9))
    assert max(map(len, long.splitlines())) <= 80 and "description a\n     description" in long
    text = printed(good, wrong)
    assert "DIFFERENT: 9 log-probs of drawn tokens, 0.2 s; 2 rows differ, largest gap 0.25" in joined(text)
    assert "sequence 1, position 3" in text and text.rstrip().endswith("No certificate.")
    text = printed(good, LinkResult("v", "drafts", 0, 0, 0.0, 0.2, "no draft held"))
    assert "NOT TESTED: 0 drawn tokens with their log-probs, 0.2 s\n" in text and "DIFFERENT" not in text
    assert "no draft held" in text and text.rstrip().endswith("No certificate.")


def test_ranks() -> None:
    links = [LinkResult(letter, "ranks", 12, 0, 0.0, 0.1) for letter in "efg"]
    text = printed(*links, ranks=2)
    assert "on cpu, each of 2 ranks" in text and "bit-equal: 12 drawn tokens with their log-probs" in text
    assert joined(text).endswith("rollout and training agree bit for bit, and 2 ranks with one.")
    assert joined(printed(*links[:2], ranks=4)).endswith("and 4 ranks with one. The update was left out.")
    text = printed(*links[:2], LinkResult("g", "update", 12, 3, None, 0.1, "rank 1: master x, row 7"), ranks=2)
    assert "DIFFERENT: 12 metrics and rows of weights and moments, 0.1 s; 3 rows differ\n" in text
    assert "rank 1: master x, row 7" in text and text.rstrip().endswith("No certificate.")
