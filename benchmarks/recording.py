"""Records a command in a terminal of its own, and draws the recording as an animated SVG of some seconds.

    python benchmarks/recording.py record quickstart.cast jetrl train quickstart
    python benchmarks/recording.py draw quickstart.cast docs/pictures/quickstart.svg --seconds 20

The recording is an asciicast (version 2), which other players read as well. The picture shows it faster: frames are
chosen evenly over the recording, and the last one stays for a while. It needs no fonts, scripts or network, moves where
CSS animations do (in an <img> too), and shows its last frame where the reader prefers reduced motion.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

COLUMNS, ROWS = 90, 22
WIDTH, HEIGHT = 8.4, 18  # of a character, in pixels
PAUSE = 0.05  # seconds without output, after which a screen is drawn
HOLD = 0.2  # the share of the time for which the last frame stays
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
_GREEN, _CYAN, _RED, _YELLOW = "#3fb950", "#39c5cf", "#ff7b72", "#d29922"
_BASIC = {31: _RED, 32: _GREEN, 33: _YELLOW, 36: _CYAN}


@dataclass(frozen=True, slots=True)
class Style:
    """How a character looks: its colour (empty: the terminal's own), and whether it is bold or dim."""

    colour: str = ""
    bold: bool = False
    dim: bool = False

    def after(self, codes: Sequence[int]) -> Style:
        """The style after an SGR sequence with these numbers."""
        style, rest = self, list(codes) or [0]
        while rest:
            code = rest.pop(0)
            if code == 0:
                style = Style()
            elif code in (1, 2):
                style = replace(style, **{"bold" if code == 1 else "dim": True})
            elif code in _BASIC:
                style = replace(style, colour=_BASIC[code])
            elif code == 38 and rest[:1] == [2]:
                style, rest = replace(style, colour="#{:02x}{:02x}{:02x}".format(*rest[1:4])), rest[4:]
            elif code == 38 and rest[:1] == [5]:
                grey = 8 + 10 * (rest[1] - 232)  # rich uses the greys of the 256 colours only
                style, rest = replace(style, colour=f"#{grey:02x}{grey:02x}{grey:02x}"), rest[2:]
            else:
                raise ValueError(f"a style that this terminal does not know: {code}")
        return style


Line = tuple[tuple[str, Style], ...]  # runs of characters of one style


@dataclass(slots=True)
class Screen:
    """As much of a terminal as rich's live display needs: it writes lines, moves up, and clears lines."""

    lines: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = Style()

    def write(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
            if token[2] is not None:
                self._control(token[1], token[2])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self.row += 1
                self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]
            else:
                self._put(token[0])

    def _put(self, text: str) -> None:
        line = self.lines[self.row]
        line += [(" ", Style())] * (self.column - len(line))
        line[self.column : self.column + len(text)] = [(character, self.style) for character in text]
        self.column += len(text)

    def _control(self, numbers: str, kind: str) -> None:
        if kind == "m":
            self.style = self.style.after([int(n or 0) for n in numbers.split(";")])
        elif kind == "A":
            self.row = max(self.row - int(numbers or 1), 0)
        elif kind == "K" and numbers == "2":
            self.lines[self.row] = []
        elif not numbers.startswith("?"):  # ?25l and ?25h hide and show the cursor, which is not drawn
            raise ValueError(f"a control sequence that this terminal does not know: {numbers}{kind}")

    def shown(self) -> tuple[Line, ...]:
        """The lines that are in use. Nothing scrolls away: the picture is as high as all that was printed."""
        used = len(self.lines)
        while used and not self.lines[used - 1]:
            used -= 1
        return tuple(map(_runs, self.lines[:used]))


def _runs(line: Sequence[tuple[str, Style]]) -> Line:
    runs: list[tuple[str, Style]] = []
    for character, style in line:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + character, style)
        else:
            runs.append((character, style))
    return tuple(runs)


def record(path: Path, command: Sequence[str]) -> int:
    """Run a command in a terminal and write what it prints, with times; returns its status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.pop("COLUMNS", None)
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start = time.monotonic()
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS}) + "\n")
        while data := _read(terminal):
            file.write(json.dumps([round(time.monotonic() - start, 3), "o", data.decode("utf-8", "replace")]) + "\n")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the program has ended
        return b""


def frames_of(path: Path, count: int) -> list[tuple[Line, ...]]:
    """`count` different screens, evenly over the recording; the last one is its end. A screen that more output follows
    at once is half drawn, and left out."""
    _, *events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    screen, found = Screen(), []
    times = [*(at for at, _, _ in events[1:]), float("inf")]
    for (at, _, text), following in zip(events, times, strict=True):
        screen.write(text)
        now = screen.shown()
        if following - at > PAUSE and now and (not found or now != found[-1]):
            found.append(now)
    if count >= len(found):
        return found
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)]


def svg_of(frames: Sequence[tuple[Line, ...]], seconds: float, title: str, command: str = "") -> str:
    """The frames as one animated SVG. Equal lines are drawn once and used again."""
    first: Line = ((f"$ {command}", Style(bold=True)),)
    screens = [(first, *frame) if command else frame for frame in frames]
    rows = max(map(len, screens))
    width, height = round(WIDTH * COLUMNS + 32), round(HEIGHT * rows + 60)
    names: dict[Line, str] = {}
    groups = list(_groups(screens, names, seconds))
    lines = "".join(f'<g id="{name}">{"".join(_texts(line))}</g>' for line, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        '<circle cx="20" cy="18" r="5" fill="#ff5f57"/><circle cx="38" cy="18" r="5" fill="#febc2e"/>'
        '<circle cx="56" cy="18" r="5" fill="#28c840"/>'
        f'<defs>{lines}</defs>{"".join(groups)}</svg>\n'
    )


_STYLE = (
    "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3;"
    "white-space:pre}.b{font-weight:700}.d{opacity:.6}"
    ".f{visibility:hidden;animation:1s steps(1) infinite}.l{visibility:visible}"
    "@media (prefers-reduced-motion:reduce){.f{animation:none!important}}"
)


def _groups(screens: Iterable[tuple[Line, ...]], names: dict[Line, str], seconds: float) -> Iterator[str]:
    """Each screen as a group that is visible during its part of the time."""
    screens = list(screens)
    step = (1 - HOLD) / len(screens)
    for number, screen in enumerate(screens):
        uses = "".join(
            f'<use href="#{names.setdefault(line, f"r{len(names)}")}" y="{round(52 + HEIGHT * row)}"/>'
            for row, line in enumerate(screen) if line
        )
        last = number == len(screens) - 1
        start, end = 100 * number * step, 100.0 if last else 100 * (number + 1) * step
        before = "0%{visibility:hidden}" if number else ""
        after = "" if last else f"{end:.2f}%{{visibility:hidden}}"
        yield (
            f"<style>@keyframes k{number}{{{before}{start:.2f}%{{visibility:visible}}{after}}}</style>"
            f'<g class="f{" l" if last else ""}" style="animation-name:k{number};animation-duration:{seconds:g}s">'
            f"{uses}</g>"
        )


def _texts(line: Line) -> Iterator[str]:
    column = 0
    for text, style in line:
        classes = " ".join([*(["b"] if style.bold else []), *(["d"] if style.dim else [])])
        look = f' class="{classes}"' if classes else ""
        look += f' style="fill:{style.colour}"' if style.colour else ""
        if text.strip():
            yield (
                f'<text x="{16 + WIDTH * column:.1f}" textLength="{WIDTH * len(text):.1f}"{look}>{escape(text)}</text>'
            )
        column += len(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorder = verbs.add_parser("record")
    recorder.add_argument("cast", type=Path)
    recorder.add_argument("command", nargs=argparse.REMAINDER)
    drawer = verbs.add_parser("draw")
    drawer.add_argument("cast", type=Path)
    drawer.add_argument("out", type=Path)
    drawer.add_argument("--seconds", type=float, default=20.0)
    drawer.add_argument("--frames", type=int, default=90)
    drawer.add_argument("--command", default="jetrl train quickstart")
    given = parser.parse_args()
    if given.verb == "record":
        return record(given.cast, given.command)
    frames = frames_of(given.cast, given.frames)
    given.out.write_text(svg_of(frames, given.seconds, given.command, given.command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
