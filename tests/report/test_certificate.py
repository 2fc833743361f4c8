"""How a certificate is printed: each link, and the first difference where there is one."""

from __future__ import annotations

import io

from rich.console import Console

from jetrl.parity import Certificate
from jetrl.parity_rows import LinkResult
from jetrl.report.certificate import print_certificate


def printed(*links: LinkResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_certificate(Certificate("fp8", "e4m3[1x16,pow2]", "cpu", "a model", 1_400_000, links), console)
    return console.file.getvalue()


def test_a_certificate_and_none() -> None:
    good = LinkResult("a", "alone = packed", 7, 0, 0.0, 0.1, None)
    wrong = LinkResult("d", "graphs = training", 9, 2, 0.25, 0.2, "sequence 1, position 3")
    text = printed(good)
    assert "1.4 M parameters" in text and "KV cache e4m3[1x16,pow2]" in text
    assert "bit-equal: 7 rows of log-probs over the whole vocabulary" in text and "agree bit for bit" in text
    text = printed(good, wrong)
    assert "DIFFERENT: 9 log-probs of drawn tokens, 0.2 s; 2 rows differ, largest gap 0.25" in text
    assert "sequence 1, position 3" in text and text.rstrip().endswith("No certificate.")
