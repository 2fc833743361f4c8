"""The parity certificate in a terminal: one verdict for each link."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from jetrl.report.text import wrapped

_COMPARED = {  # what the rows of a link are
    "d": "log-probs of drawn tokens", "m": "drawn tokens with their log-probs",
    "v": "drawn tokens with their log-probs",
    "e": "drawn tokens with their log-probs", "f": "log-probs of drawn tokens",
    "g": "metrics and rows of weights and moments",
}


def print_certificate(certificate: Any, console: Console) -> None:
    """Print a `certificate.Certificate`: each link with its verdict, and where the first difference is."""
    on = f", each of {certificate.ranks} ranks" if certificate.ranks > 1 else ""
    console.print()
    _say(
        console, f"Parity of {certificate.model} ({certificate.num_parameters / 1e6:.1f} M parameters), "
        f"precision {certificate.precision}, KV cache {certificate.kv_cache}, on {certificate.device}{on}", "bold",
    )
    for link in certificate.links:
        verdict, color = ("bit-equal", "green") if link.ok else ("DIFFERENT" if link.tested else "NOT TESTED", "red")
        _say(console, f"{link.link}  {link.description}", indent=2, hang=3)
        what = _COMPARED.get(link.link, "rows of log-probs over the whole vocabulary")
        detail = f"{link.rows} {what}, {link.seconds:.1f} s"
        if link.rows_different:
            gap = "" if link.max_abs_diff is None else f", largest gap {link.max_abs_diff:.3g}"
            detail += f"; {link.rows_different} rows differ{gap}"
        shown = Text(wrapped(f"{verdict}: {detail}", 5))
        shown.stylize(color, 5, 5 + len(verdict))
        console.print(shown)
        if link.first_difference:
            _say(console, link.first_difference, "red", indent=5)
    verdict = "Certificate: rollout and training agree bit for bit."
    if certificate.ranks > 1:
        without = "" if any(link.link == "g" for link in certificate.links) else " The update was left out."
        verdict = (
            f"Certificate: rollout and training agree bit for bit, and {certificate.ranks} ranks with one.{without}"
        )
    _say(console, verdict if certificate.ok else "No certificate.", "green" if certificate.ok else "red")


def _say(console: Console, text: str, style: str = "", indent: int = 0, hang: int = 0) -> None:
    console.print(Text(wrapped(text, indent, hang), style=style))
