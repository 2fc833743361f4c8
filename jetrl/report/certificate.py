"""The parity certificate in a terminal: one verdict for each link."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape


def print_certificate(certificate: Any, console: Console) -> None:
    """Print a `parity.Certificate`: each link with its verdict, and where the first difference is."""
    console.print(
        f"\nParity of {certificate.model} ({certificate.num_parameters / 1e6:.1f} M parameters), "
        f"precision {certificate.precision}, KV cache {escape(certificate.kv_cache)}, on {certificate.device}",
        style="bold",
    )
    for link in certificate.links:
        verdict = "[green]bit-equal[/]" if link.ok else "[red]DIFFERENT[/]"
        console.print(f"  {link.link}  {link.description}")
        what = "log-probs of drawn tokens" if link.link == "d" else "rows of log-probs over the whole vocabulary"
        detail = f"{link.rows} {what}, {link.seconds:.1f} s"
        if not link.ok:
            detail += f"; {link.rows_different} rows differ, largest gap {link.max_abs_diff:.3g}"
        console.print(f"     {verdict}: {detail}")
        if link.first_difference:
            console.print(f"     {link.first_difference}", style="red")
    verdict = "[green]Certificate: rollout and training agree bit for bit.[/]"
    console.print(verdict if certificate.ok else "[red]No certificate.[/]")
