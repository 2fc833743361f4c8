"""The pages in docs/ name what exists: modules, files, functions, tests, settings; and what they print runs."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_house_rules import RANKS, STUDY
from test_links import anchors

from jetrl.config import TaskConfig, load_config, parse_config, sections
from jetrl.config.keys import keys
from jetrl.config.task import DATA_ONLY
from jetrl.environments.conversations import build_pool
from jetrl.environments.environment import load_environment
from jetrl.tasks.environment_task import problem_seed
from jetrl.types import Completion, Problem

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jetrl"
NAMES = (
    "docs/ARCHITECTURE.md", "docs/ENVIRONMENTS.md", "docs/MODELS_AND_DATA.md", "docs/DECISIONS.md", "docs/INSTALL.md",
    "docs/ENGINES.md",
    "CONTRIBUTING.md",
)
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
ARCHITECTURE, ENVIRONMENTS = PAGES["docs/ARCHITECTURE.md"], PAGES["docs/ENVIRONMENTS.md"]

FILE = re.compile(r"(?<![\w/.<-])([\w-]+(?:/[\w.-]+)*\.(?:py|md|toml|js|css|j2|json))\b")
# Files that only a run, a user or a Hugging Face folder has.
ELSEWHERE = {
    "config.json", "adapter_config.json", "generation_config.json", "metrics.jsonl", "samples.jsonl", "config.toml",
    "env.json", "path/to/file.py", "my_tools.py",
}


def section(page: str, title: str) -> str:
    """The text under a heading `## title`."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"no section {title!r}"
    return found[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def found_at(name: str) -> Path | None:
    return next((base / name for base in (ROOT, PACKAGE, ROOT / "docs") if (base / name).is_file()), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = {name for name in FILE.findall(PAGES[page]) if name not in ELSEWHERE}
    if page == "docs/DECISIONS.md":  # says `packing.py` for `train/packing.py`
        known = {path.name for path in PACKAGE.rglob("*.py")}
        named = {name for name in named if "/" in name or name not in known}
    missing = sorted(name for name in named if found_at(name) is None)
    assert not missing, f"{page} names files that do not exist: {missing}"


def test_the_table_of_rooms_names_every_module_and_no_other() -> None:
    rows = re.findall(r"^\| `(\S+/)` \| .+ \| (.+) \|$", section(ARCHITECTURE, "Rooms"), re.M)
    table = {room: re.findall(r"`(\w+)`", modules) for room, modules in rows}
    folders = {path.parent for top in (PACKAGE, STUDY) for path in top.rglob("*.py")}
    for folder in folders:
        room = f"{folder.name}/" if folder in (PACKAGE, STUDY) else folder.relative_to(PACKAGE).as_posix() + "/"
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert room in table, f"docs/ARCHITECTURE.md has no room {room}"
        assert set(table[room]) == modules, f"{room} in docs/ARCHITECTURE.md: {set(table[room]) ^ modules}"
        assert len(table[room]) == len(modules), f"{room} names a module twice"
    assert len(table) == len(folders)


def test_the_picture_of_imports_is_that_of_the_house_rules() -> None:
    picture = re.search(r"\n\n((?:    [a-z_][a-z_ ]*\n)+)", section(ARCHITECTURE, "Rooms"))
    assert picture
    shown = [set(line.split()) for line in reversed(picture[1].splitlines())]
    assert shown == [set(rank) - {"__init__"} for rank in RANKS]


def test_the_spine_is_in_the_order_of_the_code() -> None:
    rows = re.findall(r"^\| (\w) \| `([\w.]+)` \|", section(ARCHITECTURE, "One batch, one direction"), re.M)
    for mark, file, function in (("g", "run/gather.py", "gather"), ("", "run/loop.py", "train_step")):
        calls = [call for row, call in rows if (row == "g") == bool(mark)]
        tree = ast.parse((PACKAGE / file).read_text())
        (code,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
        lines = {}
        for node in ast.walk(code):
            if isinstance(node, ast.Call):
                lines.setdefault(ast.unparse(node.func).removeprefix("session."), node.lineno)
        places = [lines[call] for call in calls]
        assert len(calls) >= 4 and places == sorted(places), dict(zip(calls, places, strict=True))


def functions_in(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGES[page]):
        assert (ROOT / file).is_file(), f"{page}: {file}"
        assert not name or name in functions_in(ROOT / file), f"{page}: {file} has no {name}"
    everywhere = {name for path in (ROOT / "tests").rglob("test_*.py") for name in functions_in(path)}
    loose = set(re.findall(r"`(test_\w+)`", PAGES[page])) - everywhere
    assert not loose, f"{page}: no test has the name {loose}"


def test_every_line_of_the_contract_has_a_test() -> None:
    contract = section(ARCHITECTURE, "The contract of exactness")
    lines = re.split(r"^(?=\d+\. )", contract, flags=re.M)[1:]
    assert [int(line.split(".")[0]) for line in lines] == list(range(1, len(lines) + 1)) and len(lines) >= 12
    for line in lines:
        tests = re.findall(r"^ +- `tests/[\w/]+\.py::test_\w+`$", line, re.M)
        on_a_cpu = [test for test in tests if "tests/gpu/" not in test]
        assert on_a_cpu, f"no test on a CPU for: {line[:80]}"
        assert len(tests) == len(re.findall(r"^ +- ", line, re.M)), f"a test is not written as file::test: {line}"


def places(text: str) -> Iterator[tuple[str, list[str]]]:
    """(file, names) wherever a text says `` `file.py`: `name`, `name` ``."""
    for file, names in re.findall(r"`([\w/.-]+\.py)`: ((?:`[\w.]+`(?:, | and )?)+)", text):
        yield file, re.findall(r"`([\w.]+)`", names)


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "docs/ENVIRONMENTS.md", "CONTRIBUTING.md"])
def test_names_are_found_in_the_files_next_to_them(page: str) -> None:
    pairs = list(places(PAGES[page]))
    assert len(pairs) >= 3
    for file, names in pairs:
        path = found_at(file)
        assert path is not None, f"{page}: {file}"
        text = path.read_text()
        for name in names:
            last = name.split(".")[-1]
            defined = rf"^\s*(?:def|class|async def) {last}\b|^{last}\b.*=|^\s*\"?{last}\"?:"
            assert re.search(defined, text, re.M), f"{page}: {file} does not define {name}"


def test_decisions_are_in_order_and_those_that_are_cited_exist() -> None:
    numbers = [int(n) for n in re.findall(r"^## D(\d+)\. ", PAGES["docs/DECISIONS.md"], re.M)]
    assert numbers == sorted(set(numbers)) and numbers[0] == 1
    cited = {int(n) for page in PAGES.values() for n in re.findall(r"\bD(\d+)\b", page)}
    assert cited <= set(numbers), f"no such decisions: {sorted(cited - set(numbers))}"


def unindexed(page: str) -> list[str]:
    """What is wrong with the list of decisions by topic, one message each; `page`: the text of DECISIONS.md."""
    index = section(page, "By topic")
    wrong, listed = list[str](), list[int]()
    by_number = {int(a[1:].partition("-")[0]): a for a in anchors(page) if re.match(r"d\d+-", a)}
    for topic in re.split(r"^### ", index, flags=re.M)[1:]:
        rows = re.findall(r"^- \[D(\d+)\]\(#([^)]*)\)\s+(.+)$", topic, re.M)
        here = [int(number) for number, _, _ in rows]
        listed += here
        if here != sorted(here) or len(rows) != topic.count("- [D"):
            wrong.append(f"{topic.splitlines()[0]}: one line `- [Dn](#anchor) title` for each decision, in their order")
        for number, anchor, title in rows:
            if by_number.get(int(number)) != anchor:
                wrong.append(f"D{number} links to #{anchor}; its heading is #{by_number.get(int(number))}")
            if not 5 <= len(title.split()) <= 8:
                wrong.append(f"D{number}: a title of five to eight words, not {title!r}")
    for number, anchor in sorted(by_number.items()):
        if listed.count(number) != 1:
            wrong.append(f"D{number} is {listed.count(number)} times in the list by topic; give it one line "
                         f"`- [D{number}](#{anchor}) title` under its topic")
    return wrong


def test_every_decision_is_in_the_list_by_topic_once() -> None:
    assert not unindexed(PAGES["docs/DECISIONS.md"])


@pytest.mark.parametrize(("index", "message"), [
    ("- [D1](#d1-one-thing) one two three four five\n", "D2 is 0 times in the list by topic; give it one line "
     "`- [D2](#d2-another-thing) title` under its topic"),
    ("- [D1](#d1-one-thing) one two three four five\n- [D2](#d2-others) one two three four five\n",
     "D2 links to #d2-others; its heading is #d2-another-thing"),
    ("- [D1](#d1-one-thing) one two three four five\n- [D2](#d2-another-thing) short\n",
     "D2: a title of five to eight words, not 'short'"),
    ("- [D2](#d2-another-thing) one two three four five\n- [D1](#d1-one-thing) one two three four five\n",
     "Topic: one line `- [Dn](#anchor) title` for each decision, in their order"),
])
def test_a_wrong_list_of_decisions_is_found(index: str, message: str) -> None:
    page = f"# Decisions\n\n## By topic\n\n### Topic\n\n{index}\n## D1. One thing\n\n## D2. Another thing\n"
    assert unindexed(page) == [message]


# ---- what the pages print -------------------------------------------------------------------------------------------

BASE = """
name = "docs"
[model]
tokenizer = "builtin:arithmetic"
[model.arch]
model_type = "qwen3"
[task]
name = "addition"
"""


def merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v
            for k, v in other.items()}
    return {**base, **both}


COMMAND = re.compile(r"^    jetrl train (\S+\.toml.*)$", re.M)
COMMANDS = [line.split() for page in PAGES.values() for line in COMMAND.findall(page)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_printed_commands_have_good_settings(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe, *overrides = words
    load_config(recipe, overrides)


@pytest.mark.parametrize("number", range(len(blocks(ENVIRONMENTS, "toml"))))
def test_printed_settings_are_settings(number: int) -> None:
    printed = tomllib.loads(blocks(ENVIRONMENTS, "toml")[number])
    base = tomllib.loads(BASE)
    if "model" in printed:
        del base["model"]
    config = parse_config(merged(base, printed))
    assert config.environment.name is not None


def test_printed_models_and_data_are_settings() -> None:
    page = PAGES["docs/MODELS_AND_DATA.md"]
    model, *tasks = (tomllib.loads(block) for block in blocks(page, "toml"))
    for printed in ({**model, "task": {"name": "addition"}}, *({**model, **task} for task in tasks)):
        config = parse_config({"name": "docs", **printed})
        assert config.model.path == "Qwen/Qwen3-0.6B"
    rows = re.findall(r"^\| (`\w+`.*?) \|", section(page, "Data: a name on the hub"), re.M)
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    of_data = {key.name for key in keys().values() if DATA_ONLY in key.markers}
    which_rows = {"overlong_prompts", "repeated_prompts", "max_data_gib"}
    assert len(of_data) > 15 and named == of_data - which_rows - {"train_file", "eval_file"}


def test_the_table_of_settings_is_complete_and_has_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`|(none)) \|", section(ENVIRONMENTS, "Settings"), re.M)
    fields = sections()["environment"].model_fields
    assert [name for name, *_ in rows] == list(fields)
    for name, value, none in rows:
        default = fields[name].get_default(call_default_factory=True)
        assert (None if none else tomllib.loads(f"x = {value}")["x"]) == default, name


class Codes:
    """A tokenizer of code points."""

    chat_template = None
    eos_token, eos_token_id = "<eos>", 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]


def talk(file: Path, name: str, params: Mapping[str, Any], turns: list[str]) -> list[Any]:
    """What an environment in a file says to these turns; the first reply is its prompt."""
    pool = build_pool(load_environment(f"{file}:{name}", params), Codes(), TaskConfig(name="environment"), timeout=20.0)
    seed = problem_seed(0, 0)
    pool.start(0, Problem("docs/0", "", "", extra={"seed": seed, "index": 0}))
    replies = pool.poll(True)
    for i, turn in enumerate(turns):
        pool.act(0, Completion(0, (i + 1,), (0.0,), turn, "stop", 0, ""))
        replies += pool.poll(True)
    pool.shutdown()
    assert not any(reply.error for reply in replies), replies
    return replies


def test_the_twenty_lines_are_the_example() -> None:
    first = blocks(ENVIRONMENTS, "python")[0]
    source = (ROOT / "examples" / "guess_number.py").read_text()
    assert first.strip() == source.split('"""', 2)[2].strip()
    assert len(first.strip().splitlines()) <= 20


def test_the_example_plays() -> None:
    replies = talk(ROOT / "examples" / "guess_number.py", "GuessNumber", {"low": 1, "high": 3}, ["x", "0", "4"])
    assert [r.text for r in replies] == ["1:3?", "?", ">", "<"]
    assert [r.reward for r in replies] == [None, -0.1, 0.0, 0.0]


def test_every_class_that_is_printed_holds_a_conversation(tmp_path: Path) -> None:
    """The others speak of servers: what they call is replaced by a function that answers at once."""
    printed = blocks(ENVIRONMENTS, "python")[1:]
    for number, code in enumerate(printed):
        names = re.findall(r"^class (\w+)", code, re.M)
        if not names:
            compile(code, "ENVIRONMENTS.md", "exec")
            continue
        file = tmp_path / f"printed_{number}.py"
        file.write_text(code + "\nasync def ask_server(*_):\n    return 'well', 0.5\n")
        replies = talk(file, names[0], {}, ["one", "two"])
        assert replies[0].text and replies[1].text and not replies[1].done, replies
