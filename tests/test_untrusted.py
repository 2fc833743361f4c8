"""Text, JSON and names of others: each has one function, and no door does without."""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from tiny import tiny_run

from jetrl.config.toml import read_toml
from jetrl.errors import OutOfMemory, UserError
from jetrl.huggingface import hub
from jetrl.huggingface import read as hf
from jetrl.huggingface.tokenizer import load_tokenizer_from
from jetrl.report.console import Display, Output, summary
from jetrl.report.files import write_whole
from jetrl.report.html import write_report
from jetrl.report.recorder import Recorder, read_eval_samples, read_held_out, read_samples
from jetrl.report.run import load_runs
from jetrl.report.track import read_kept
from jetrl.run.compiling.display import Compiling
from jetrl.run.tryout import read_script
from jetrl.tasks.datasets import read_dataset
from jetrl.untrusted import MOST_DEPTH, inside, json_file, json_value, printable

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "jetrl").rglob("*.py"), *(ROOT / "jetrl_study").rglob("*.py")])
EVIL = "\x1b]0;owned\x07 \x1b[2J \x9b31m \u202edlrow\u202c \r \udcff"


def harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\u202e\u202c\r\udcff")


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\tb\nc \u00e9 \u65e5 \U0001f600") == "a\tb\nc \u00e9 \u65e5 \U0001f600"
    assert printable("\x1b[2J\r\x07\x9b\u202e\ud800") == r"\x1b[2J\r\x07\x9b\u202e\ud800"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)):
        assert harmless(printable(chr(code))) and printable(chr(code)).startswith("\\"), hex(code)


def test_mistakes_are_printable_from_python_too() -> None:
    """A notebook prints the traceback itself."""
    assert harmless(str(UserError(EVIL))) and "\\x1b[2J" in str(OutOfMemory(f"{EVIL}"))
    assert str(UserError("two\n\tlines")) == "two\n\tlines"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_text_steers_the_console(terminal: bool) -> None:
    """By all ways of rich: plain, markup, tables, panels, and the display with its panel."""
    file = StringIO()
    console = Output(file=file, force_terminal=terminal, color_system=None, width=200, legacy_windows=False)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(EVIL, "[bold]no markup[/] [link=file:///x]x[/link] :bomb:")
    console.print(table)
    console.print(Panel(EVIL, title=EVIL))
    console.out(EVIL)
    summary(run_dir=EVIL, steps=1, seconds=1.0, next_commands=[(EVIL, EVIL)], console=console)
    text = file.getvalue()
    assert harmless(text) and "[bold]no markup[/] [link=file:///x]x[/link] :bomb:" in text


@pytest.mark.parametrize("kind", [Console, Output])
def test_no_text_steers_the_display(kind: type[Console]) -> None:
    file = StringIO()
    console = kind(file=file, width=200)
    with Display(2, EVIL, about=EVIL, console=console, interval=0.0) as display:
        display.phase(EVIL, 2)
        display.advance()
        display.message(EVIL)
        display.hint(1, EVIL, EVIL)
        display.step({"step": 2, "reward/mean": 0.0})
    with Compiling(1, console=console) as compiling:
        compiling.message(EVIL)
    assert harmless(file.getvalue()) and "\\x1b[2J" in file.getvalue()


def test_what_a_program_tells_is_guarded() -> None:
    """Warnings, log lines and tracebacks may quote files."""
    program = f"""
import logging, threading, warnings
from jetrl.untrusted import guard_terminal
guard_terminal()
guard_terminal()
warnings.warn({EVIL!r})
logging.getLogger("x").warning("%s", {EVIL!r})
thread = threading.Thread(target=lambda: 1 // 0, name={EVIL!r})
thread.start(), thread.join()
raise RuntimeError({EVIL!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, check=False)
    told = done.stderr.decode()
    assert done.returncode == 1 and harmless(told) and told.count("\\x1b[2J") >= 3, told


def test_a_warning_of_ours_is_a_line_of_ours_and_others_keep_their_place() -> None:
    """No file and no source of jetrl's; those of the user's own code are what helps him."""
    program = f"""
import warnings
from jetrl.errors import Notice
from jetrl.untrusted import guard_terminal
guard_terminal()
warnings.warn("Do this. " + {EVIL!r}, Notice)
warnings.warn("of a library")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, check=False)
    told = done.stderr.decode()
    first, _, rest = told.partition("<string>:7: UserWarning: of a library")
    assert first.startswith("jetrl: warning: Do this. ") and first.count("\n") == 1 + EVIL.count("\n") and rest
    assert harmless(told) and "Notice" not in told and "errors.py" not in told


def test_every_warning_of_ours_is_a_notice() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and called(node) in ("warnings.warn", "warn", "warnings.warn_explicit")
        and "Notice" not in map(ast.unparse, node.args[1:2])
    ]
    assert wrong == []


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_all_that_is_printed_is_printable() -> None:
    """`print` and `echo` get `printable` text, JSON (which is ASCII) or a text of ours; consoles are `Output`s."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
            if called(node) in ("Console", "rich.print"):
                wrong.append(where)
            if called(node) in ("print", "typer.echo", "click.echo", "sys.stderr.write", "sys.stdout.write"):
                first = node.args[0] if node.args else ast.Constant("")
                ours = isinstance(first, ast.Constant) or "__version__" in ast.unparse(first)
                guarded = isinstance(first, ast.Call) and called(first) in ("printable", "json.dumps")
                if not ours and not guarded:
                    wrong.append(where)
    # names of threads and processes; our own descriptions
    ours = ("jetrl/process_exit.py", "jetrl/config/docs.py", "jetrl/report/metrics.py")
    assert [text for text in wrong if not text.startswith(ours)] == []


# Other calls of json.loads: what this very program, or another process of this run, has written.
OWN_JSON = {
    "jetrl/untrusted.py", "jetrl/chat/template_child.py", "jetrl/parallel/watch.py", "jetrl/run/checkpoint/resume.py",
    "jetrl/serve/pipe.py",  # what one process of the server sends the other
    "jetrl/environments/verifiers_worker.py",  # what the run asks of the process that it started
}


def test_json_of_others_has_one_reader() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in FILES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and called(node) in ("json.load", "json.loads")
    }
    assert found == OWN_JSON


def test_json_is_bounded(tmp_path: Path) -> None:
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json_value(deepest.encode()) == json.loads(deepest) and json_value('{"a": [1]}') == {"a": [1]}
    assert len(json_value("[" + "[]," * 999 + "[]]")) == 1000  # wide, not deep
    for text in ("[" * 200_000, f"[{deepest}]", '{"a":' * 999 + "1" + "}" * 999):
        with pytest.raises(ValueError, match=f"nested more than {MOST_DEPTH} deep|Expecting"):
            json_value(text)
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 100 + '"')
    assert json_file(path, 102) == "x" * 100
    with pytest.raises(ValueError, match="it has more than"):
        json_file(path, 101)


# Other calls that read a whole file: of jetrl itself, of this machine, or code of the user's that runs next.
OWN_FILES = {
    "jetrl/cli.py", "jetrl/config/shipped.py",  # recipes that come with jetrl
    "jetrl/config/docs.py", "jetrl/pages.py", "jetrl/report/html.py", "jetrl_study/page.py", "jetrl/requirements.py",
    "jetrl/run/compiling/ahead.py",
    "jetrl/doctor/gpu.py", "jetrl/parallel/host.py", "jetrl/report/environment.py",
    "jetrl/huggingface/write.py", "jetrl/parallel/spawn.py", "jetrl_study/jobs.py",  # what its own processes write
    "jetrl/user_code/neighbours.py", "jetrl/kernels/compiling/pool.py",
}


def test_whole_files_of_others_have_one_reader() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = called(node).rpartition(".")[2]
                whole = name == "read" and not node.args and not node.keywords
                if whole or name in ("read_text", "read_bytes", "readlines") or called(node) == "tomllib.load":
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == OWN_FILES | {"jetrl_study/state.py"}, "text_file reads files of others; the end of one: state.py"


WHOLE = {  # what jetrl reads whole: of a run folder, of a model folder
    "config.toml": lambda folder: read_toml(folder / "config.toml"),
    "report: config.toml": lambda folder: load_runs([folder]),
    "report: env.json": lambda folder: load_runs([folder]),
    "report: metrics.jsonl": lambda folder: load_runs([folder]),
    "report: flow.svg": lambda folder: write_report([folder], folder / "report.html"),
    "report: samples.jsonl": lambda folder: write_report([folder], folder / "report.html"),
    "heldout.jsonl": read_held_out,
    "model: config.json": hf.read_config,
    "model: generation_config.json": hf.read_generation_config,
    "model: tokenizer.json": load_tokenizer_from,
    "model: chat_template.jinja": load_tokenizer_from,
    "card: README.md": lambda folder: list(read_dataset(str(folder), None, None, "train").rows),
    "script: turns": lambda folder: read_script(folder / "turns"),
}


@pytest.mark.parametrize("kind", ["device", "pipe", "huge"])
@pytest.mark.parametrize("what", WHOLE)
def test_files_without_an_end_are_refused(tmp_path: Path, what: str, kind: str) -> None:
    """A link to /dev/zero, a pipe that nobody writes, and a sparse file of 8 GiB: none fills memory or hangs."""
    files = {"metrics__jsonl": '{"step": 0, "reward/mean": 0.5}\n'} if "model" not in what else {
        "config__json": "{}", "tokenizer__json": "{}"}
    folder = model_with(tmp_path / "folder", **files)
    path = folder / what.rpartition(" ")[2]
    path.unlink(missing_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(8 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = ""
    try:
        WHOLE[what](folder)
    except UserError as error:
        told = str(error)
    refused = any(reason in told for reason in ("more than", "no regular file", "outside of"))
    assert refused or (not path.is_file() and (not told or "has no " in told)), told  # or as if it were not there
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def test_pipes_and_devices_are_read_where_they_are_named(tmp_path: Path) -> None:
    program = "from pathlib import Path; from jetrl.config.toml import read_toml; print(read_toml(Path('/dev/stdin')))"
    done = subprocess.run([sys.executable, "-c", program], input="a = 1", capture_output=True, text=True, check=True)
    assert done.stdout == "{'a': 1}\n"
    with pytest.raises(UserError, match="/dev/zero: cannot be read: it has more than 16 MiB"):
        read_toml(Path("/dev/zero"))


def test_names_stay_inside(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    (folder / "sub").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "a").write_text("a")
    (folder / "here").symlink_to("a")
    (folder / "sub" / "up").symlink_to("../a")
    (folder / "out").symlink_to(secret)
    (folder / "away").symlink_to(tmp_path)
    for name in ("a", "here", "sub/up", "new", "sub"):
        assert inside(folder, name) == folder / name
    for name in ("../secret", "sub/../../secret", str(secret), "", "..", "a\0", "C:/x"):
        with pytest.raises(UserError, match=r"index.json names .* outside of"):
            inside(folder, name, source="index.json", links=True)
    for name in ("out", "away/secret"):
        with pytest.raises(UserError, match="leads by a link to .*secret, outside of"):
            inside(folder, name)
        assert inside(folder, name, links=True) == folder / name


def test_snapshots_of_the_hub_are_whole_folders(tmp_path: Path) -> None:
    """Links into the blobs of the same repository lead inside, also through a link to the snapshot; others do not."""
    repository, secret = tmp_path / "models--org--name", tmp_path / "secret"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    secret.write_text("secret")
    (repository / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "tokenizer_extra.txt").symlink_to(secret)
    (tmp_path / "mine").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "mine"):
        inside(folder, "config.json")
        with pytest.raises(UserError, match="leads by a link"):
            inside(folder, "tokenizer_extra.txt")
    elsewhere = tmp_path / "x" / "snapshots" / "y"  # no repository of a cache
    elsewhere.mkdir(parents=True)
    (tmp_path / "x" / "blobs").mkdir()
    (tmp_path / "x" / "blobs" / "abc").write_text("{}")
    (elsewhere / "config.json").symlink_to("../../blobs/abc")
    with pytest.raises(UserError, match="leads by a link"):
        inside(elsewhere, "config.json")


# ---- doors: each takes in a folder or file of others, and tells of it by one clean message ---------------------------


def model_with(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def told_by(call: object) -> str:
    with pytest.raises(UserError) as told:
        call()  # type: ignore[operator]
    return str(told.value)


DEEP = "[" * 200_000


def test_names_in_an_index_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        folder = tmp_path / f"m{len(name)}"
        model_with(folder, config__json="{}")
        (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        assert "outside of" in told_by(lambda: hf.tensor_files(folder))  # noqa: B023
        assert "outside of" in told_by(lambda: hub._lacks(folder, True))  # noqa: B023


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", hf.INDEX])
def test_json_of_a_model_is_bounded(tmp_path: Path, name: str) -> None:
    folder = model_with(tmp_path / "m", config__json="{}")
    (folder / name).write_text(DEEP)
    call = {
        "config.json": lambda: hf.read_config(folder),
        "generation_config.json": lambda: hf.read_generation_config(folder),
        hf.INDEX: lambda: hf.tensor_files(folder),
    }[name]
    assert "is not valid JSON: lists or tables are nested more than" in told_by(call)


def test_cards_stay_inside(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.txt").write_text("secret")
    heads = {
        "up": "configs:\n- config_name: default\n  data_dir: ../other\n",
        "absolute": f"configs:\n- config_name: default\n  data_dir: {tmp_path}/other\n",
        "up_file": "configs:\n- config_name: default\n  data_files: ../secret.txt\n",
        "dir_and_file": "configs:\n- config_name: default\n  data_dir: ..\n  data_files: secret.txt\n",
        "link": "configs:\n- config_name: default\n  data_files: link.txt\n",
        "aliases": "a: &a [1,2]\nb: [*a, *a]\n",
        "deep": f"a: {'[' * 5000}\n",
        "none": "",
    }
    for name, head in heads.items():
        folder = model_with(tmp_path / name, README__md=f"---\n{head}---\n")
        (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
        told = told_by(lambda: list(read_dataset(str(folder), None, None, "train").rows))  # noqa: B023
        assert "outside of" in told or "not valid YAML" in told, (name, told)


def test_folders_of_others_are_shown_without_a_crash(tmp_path: Path) -> None:
    """What a report reads of a run: rows, config and environment of any form and depth."""
    row = '{"step": 0, "reward/mean": 0.5}\n'
    damaged = {
        "deep_row": {"metrics__jsonl": f'{{"step": {DEEP}\n' + row}, "deep_config": {"config__toml": f"a = {DEEP}"},
        "dotted": {"config__toml": f"{'a.' * 5000}a = 1"}, "deep_env": {"env__json": DEEP},
        "list_env": {"env__json": "[]"}, "task": {"config__toml": "task = 1"},
        "arch": {"config__toml": "model.arch = 1"},
        "gpus": {"env__json": '{"gpu": "x", "gpu_count": "many"}'}, "step": {"metrics__jsonl": '{"step": 1e999}\n'},
    }
    for name, files in damaged.items():
        folder = model_with(tmp_path / name, **({"metrics__jsonl": row} | files))
        assert str(folder) in told_by(lambda: load_runs([folder])), name  # noqa: B023
    held = model_with(tmp_path / "held", heldout__jsonl='{"step": 1, "rewards": [1]}\n')
    assert "an unexpected form" in told_by(lambda: read_held_out(held))


def test_messages_of_the_command_line_are_printable(tmp_path: Path) -> None:
    """Names, configs and templates of others in an error that the command line tells; also from a rank."""
    folder = model_with(tmp_path / "evil\x1b]0;title\x07\x1b[2J", config__json='{"model_type": "\x1b[2J\\u001b[2J"}')
    (folder / "config.json").write_text(json.dumps({"model_type": "\x1b[2J"}))
    for arguments in (["parity", str(folder)], ["report", str(folder)], ["parity", str(folder), "--nproc", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "jetrl.cli", *arguments], capture_output=True, cwd=ROOT, check=False,
        )
        told = done.stderr.decode() + done.stdout.decode()
        assert done.returncode == 2 and harmless(told) and "\\x1b[2J" in told, told


OPENED: list[str] = []  # by `watch_opened`, while a test has it watch
_WATCH: list[bool] = []


def _opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _WATCH and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


@contextmanager
def watch_opened() -> Iterator[list[str]]:
    """The names of all files that are opened meanwhile, whoever opens them."""
    if not hasattr(sys, "_jetrl_watched"):
        sys._jetrl_watched = True  # type: ignore[attr-defined]  # a hook stays as long as the process
        sys.addaudithook(_opened)
    OPENED.clear()
    _WATCH.append(True)
    try:
        yield OPENED
    finally:
        _WATCH.clear()


def resumed(folder: Path) -> None:
    with Recorder(folder, resume=True) as recorder:
        recorder.write_environment(["test"])


READERS = {
    "report": lambda folder: write_report([folder], folder.parent / "page.html"),
    "samples": lambda folder: [*read_samples(folder), *read_eval_samples(folder)],
    "held out": read_held_out, "tracker": read_kept, "resume": resumed,
}


@pytest.mark.parametrize("reader", READERS)
def test_no_link_out_of_a_run_folder_is_read(reader: str, run_folder: Path, tmp_path: Path) -> None:
    """A page is sent to others, and so is a folder. Of all files that a run leaves, each is once a link."""
    files = [path for path in run_folder.iterdir() if path.is_file()]
    assert {"flow.svg", "config.toml", "env.json", "metrics.jsonl", "track.json"} <= {path.name for path in files}
    refused = []
    for number, file in enumerate(files):
        folder, secret = tmp_path / str(number) / "run", tmp_path / str(number) / "secret"
        shutil.copytree(run_folder, folder)
        (folder / file.name).rename(secret)
        (folder / file.name).symlink_to(secret)
        with watch_opened() as opened:
            try:
                READERS[reader](folder)
            except UserError as error:
                assert "link" in str(error) and file.name in str(error)
                refused.append(file.name)
        assert opened or refused
        assert [name for name in opened if Path(name).resolve() == secret] == [], f"{file.name} was followed"
    assert refused


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run(tmp_path_factory.mktemp("run"), {"train.steps": 1})
    (folder / "track.json").write_text('{"wandb": {"id": "x"}}\n')
    return folder


def test_files_of_a_run_folder_that_are_no_text_or_endless_are_one_message(tmp_path: Path) -> None:
    row = '{"step": 0, "reward/mean": 0.5}\n'
    for i, name in enumerate(("flow.svg", "config.toml", "env.json")):
        folder = model_with(tmp_path / str(i), metrics__jsonl=row)
        (folder / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match=f"{name} is not UTF-8 text"):
            write_report([folder], tmp_path / "r.html")
        with (folder / name).open("wb") as file:
            file.truncate((64 << 20) + 1)
        with pytest.raises(UserError, match=f"{name}: it has more than 64 MiB"):
            write_report([folder], tmp_path / "r.html")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=f"{name}: it is no regular file, but a pipe"):
            write_report([folder], tmp_path / "r.html")


def test_no_link_in_a_run_folder_is_written_through(tmp_path: Path) -> None:
    """A report, and a resumed run, write into a folder that may be anyone's."""
    mine = tmp_path / "mine"
    row = '{"step": 0, "reward/mean": 0.5}\n'

    def run(name: str, link: str) -> Path:
        mine.write_text("mine\n")
        folder = model_with(tmp_path / name, metrics__jsonl=row)
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(mine)
        return folder

    for i, link in enumerate(("report.html", ".report.html.tmp")):
        folder = run(f"report{i}", link)
        write_report([folder], folder / "report.html")
        assert not (folder / "report.html").is_symlink() and mine.read_text() == "mine\n"
    for i, link in enumerate(("flow.svg", ".flow.svg.tmp")):
        write_whole(run(f"whole{i}", link) / "flow.svg", "x")
        assert mine.read_text() == "mine\n"
    for i, link in enumerate(("metrics.jsonl", "samples.jsonl", "heldout.jsonl", ".lock")):
        folder = run(f"recorder{i}", link)
        with pytest.raises(UserError, match="is a link to .*mine, and writing there would change that file"):
            Recorder(folder, resume=True)
        assert mine.read_text() == "mine\n"
    for link in (".metrics.jsonl.tmp", ".config.toml.tmp", ".env.json.tmp", "config.toml", "env.json"):
        folder = run(f"rows{link}", link)
        with Recorder(folder, resume=True) as recorder:
            recorder.drop_after(0)
            recorder.write_config("a = 1")
            recorder.write_environment(["x"])
        assert mine.read_text() == "mine\n", link
