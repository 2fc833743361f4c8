"""The parity certificate in a terminal: one verdict for each link."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

_COMPARED = {  # what the rows of a link are
    "d": "log-probs of drawn tokens", "e": "drawn tokens with their log-probs", "f": "log-probs of drawn tokens",
    "g": "metrics and rows of weights and moments",
}


def print_certificate(certificate: Any, console: Console) -> None:
    """Print a `parity.Certificate`: each link with its verdict, and where the first difference is."""
    on = f", each of {certificate.ranks} ranks" if certificate.ranks > 1 else ""
    console.print(
        f"\nParity of {certificate.model} ({certificate.num_parameters / 1e6:.1f} M parameters), "
        f"precision {certificate.precision}, KV cache {escape(certificate.kv_cache)}, on {certificate.device}{on}",
        style="bold",
    )
    for link in certificate.links:
        verdict = "[green]bit-equal[/]" if link.ok else "[red]DIFFERENT[/]"
        console.print(f"  {link.link}  {link.description}")
        what = _COMPARED.get(link.link, "rows of log-probs over the whole vocabulary")
        detail = f"{link.rows} {what}, {link.seconds:.1f} s"
        if not link.ok:
            gap = "" if link.max_abs_diff is None else f", largest gap {link.max_abs_diff:.3g}"
            detail += f"; {link.rows_different} rows differ{gap}"
        console.print(f"     {verdict}: {detail}")
        if link.first_difference:
            console.print(f"     {link.first_difference}", style="red")
    verdict = "[green]Certificate: rollout and training agree bit for bit.[/]"
    if certificate.ranks > 1:
        without = "" if any(link.link == "g" for link in certificate.links) else " The update was left out."
        verdict = (
            "[green]Certificate: rollout and training agree bit for bit, and "
            f"{certificate.ranks} ranks with one.{without}[/]"
        )
    console.print(verdict if certificate.ok else "[red]No certificate.[/]")
