"""Pages as the browser chromium draws them, for tests of reports."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ATTACK = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def drawn(page: Path, folder: Path) -> str:
    """The page as a browser has it after its script."""
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=2000 --window-size=1000,2000 --dump-dom"
    ).split()
    command = ["chromium", *options, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert 'data-drawn="true"' in text  # set by the last line of the script
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def section(text: str, name: str) -> str:
    """One section of the page."""
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
