"""A user's file imports what lies next to it, when it is loaded and later; names that would go wrong are refused."""

import sys
import threading

import pytest

from jetrl.environments.environment import load_environment
from jetrl.errors import UserError
from jetrl.rewards.score import call_reward
from jetrl.types import Problem
from jetrl.user_code import neighbours
from jetrl.user_code.importing import import_attribute
from jetrl.user_code.neighbours import Neighbours


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Each test has a finder of its own, and leaves no module behind."""
    monkeypatch.setattr(neighbours, "_FINDER", Neighbours())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("nb_", "jetrl_file_")):
            del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def one():
    return [(Problem("i", "p", "a"), "text", (1,))]


def test_neighbours_are_imported_at_once_and_later(tmp_path, monkeypatch):
    write(
        tmp_path / "code", nb_more="SCALE = 3.0\n",
        nb_score="from nb_more import SCALE\ndef score(n): return SCALE * n\n",
        nb_late="OFFSET = 0.5\n",
        mine="from nb_score import score\ndef reward(completions):\n    from nb_late import OFFSET\n"
        "    import nb_package.inner\n    return [score(1) + OFFSET + nb_package.inner.ONE for _ in completions]\n",
    )
    write(tmp_path / "code" / "nb_package", __init__="", inner="ONE = 1.0\n")
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    reward = import_attribute("code/mine.py:reward", "task.reward", "function")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the folder is known by its full path
    found = []
    thread = threading.Thread(target=lambda: found.append(call_reward(reward, one())))
    thread.start()
    thread.join()
    assert found == [[4.5]] and sys.path == path


def test_environments_import_their_neighbours_too(tmp_path):
    write(
        tmp_path, nb_words="HELLO = 'hello'\n",
        env="import nb_words\nclass Env:\n    def reset(self, problem): return nb_words.HELLO\n"
        "    def step(self, action): return None, 0.0, True\n",
    )
    assert load_environment(f"{tmp_path}/env.py:Env", {})().reset({}) == "hello"


def test_a_name_that_is_taken_is_refused(tmp_path):
    write(tmp_path, json="", mine="import json\ndef f(completions): ...\n")
    message = (r"task.reward: .*mine.py imports json, and .*json.py lies next to it, but the import would give "
               r".*json/__init__.py. Rename the file that lies next to yours.")
    with pytest.raises(UserError, match=message):
        import_attribute(f"{tmp_path}/mine.py:f", "task.reward", "function")
    write(tmp_path, json="1 / 0", mine="def f(completions): ...\n")  # what it does not import may have any name
    import_attribute(f"{tmp_path}/mine.py:f", "task.reward", "function")
    import json

    assert json.dumps(1) == "1"


def test_two_folders_with_one_name(tmp_path):
    text = "def f(completions):\n    import nb_same\n    return [nb_same.WHO]\n"
    for who in "ab":
        write(tmp_path / who, nb_same=f"WHO = {ord(who)}\n", mine=text)
    first = import_attribute(f"{tmp_path}/a/mine.py:f", "task.reward", "function")
    with pytest.raises(UserError, match="the import would give .*a/nb_same.py.*Or start a new Python process"):
        import_attribute(f"{tmp_path}/b/mine.py:f", "task.reward", "function")
    assert call_reward(first, one()) == [97.0]
    # A file that does not say so in advance meets the error when it imports.
    write(tmp_path / "c", nb_other="WHO = 1\n", mine="def f(completions): ...\n")
    write(tmp_path / "d", nb_other="WHO = 2\n", mine="def f(completions): ...\n")
    for folder in "cd":
        import_attribute(f"{tmp_path}/{folder}/mine.py:f", "task.reward", "function")
    with pytest.raises(ImportError, match="nb_other may be .*c/nb_other.py and .*d/nb_other.py: rename one"):
        import nb_other  # noqa: F401


def test_a_folder_without_modules_is_no_package(tmp_path):
    (tmp_path / "nb_data").mkdir()
    write(tmp_path, mine="def f(completions): ...\n")
    import_attribute(f"{tmp_path}/mine.py:f", "task.reward", "function")
    with pytest.raises(ModuleNotFoundError):
        import nb_data  # noqa: F401


def test_a_missing_neighbour_is_still_told(tmp_path):
    write(tmp_path, mine="import nb_gone\n")
    with pytest.raises(UserError, match="cannot be loaded: ModuleNotFoundError: No module named 'nb_gone'"):
        import_attribute(f"{tmp_path}/mine.py:f", "task.reward", "function")
