"""`jetrl env`: environments tried without a model tell what a run would see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizer import saved

from jetrl import cli
from jetrl.errors import UserError
from jetrl.run.tryout import Typed, prepare_trial, printable, read_script, try_out

ROOT = Path(__file__).parents[2]
GUESS = f"{ROOT}/examples/guess_number.py:GuessNumber"
BAD = '''
import time


class Bad:
    def __init__(self, how="raise"):
        self.how = how

    def reset(self, problem):
        return [{"role": "system", "content": "\\x1b[2Jbe brief"}, {"role": "user", "content": str(problem["index"])}]

    def step(self, action):
        if self.how == "raise":
            raise KeyError("no such move")
        if self.how == "hang":
            time.sleep(5)
        if self.how == "none":
            return "go on", None, False
        return "only a text"
'''
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return a + b
'''


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "my_tools.py").write_text(TOOLS)

    def run(name: str, *says: str, overrides: tuple[str, ...] = (), **more: str | int) -> tuple[int, str]:
        lines: list[str] = []
        names = tuple(text.replace("HERE", str(tmp_path)) for text in (name, *overrides))
        trial = prepare_trial(names[0], names[1:], **more)  # type: ignore[arg-type]
        return try_out(trial, iter(says), lines.append), "\n".join(lines)

    return run


def test_an_environment_of_ones_own(tell: Callable[..., tuple[int, str]]) -> None:
    status, told = tell(GUESS, "x", "1", "2", "3", "4", overrides=("environment.params.high=3",))
    assert status == 0 and "user: 1:3?\npolicy: x\nuser: ?\n  reward -0.1, goes on" in told
    assert "done\n\nended by stop" in told and "of the script: not said." in told and "the sum over the turns" in told
    assert tell(GUESS, "x", problem=1)[1] != tell(GUESS, "x", problem=0)[1], "another seed"
    assert tell(GUESS, "x")[1].endswith("The script is over, and the conversation is not.")
    assert "ended by turns (environment.max_turns) after 2 turns" in tell(
        GUESS, "x", "y", "z", overrides=("environment.max_turns=2",)
    )[1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "failed by error: Bad.step raised KeyError: 'no such move' ("), ("type", "must return three values"),
        ("hang", "failed by timeout: Bad.step took longer than environment.timeout = 0.3 seconds"),
    ],
)
def test_failures_are_told_as_a_run_sees_them(tell: Callable[..., tuple[int, str]], how: str, message: str) -> None:
    settings = (f"environment.params.how={how}", "environment.timeout=0.3")
    status, told = tell("HERE/bad.py:Bad", "a", overrides=settings)
    assert status == 2 and message in told
    assert "system: \\x1b[2Jbe brief\nuser: 0\npolicy: a" in told, "no text reaches the terminal as a command"


def test_the_built_in_ones(tell: Callable[..., tuple[int, str]]) -> None:
    _, told = tell("retry", "3", "4", overrides=("environment.params.feedback=Again.",))
    assert told.count("policy: ") == 2 and "user: Again.\n" in told and "ended by stop after 2 turns" in told
    _, told = tell("calculator", "<12+30>", "#42", overrides=('rollout.stop=[">"]',))
    assert "policy: <12+30>\nuser: =42.\n" in told


def test_a_recipe_with_its_tokenizer_and_its_task(tell: Callable[..., tuple[int, str]]) -> None:
    _, told = tell("tools", "348+275=<348+275> and more", "#623")
    assert "policy (17 tokens): 348+275=<348+275>\nuser: =623.\n  rendered (5 tokens):\n  | =623." in told
    assert "27 tokens after the prompt" in told
    _, told = tell("tools", "9" * 60)
    assert "[cut off by the limit of its length]\n\nended by length (rollout.max_response_length) after 1 turn" in told
    _, other = tell(GUESS, "5", data=f"{ROOT}/examples/guess_number.toml", overrides=("environment.params.high=3",))
    assert "  rendered (4 tokens):\n  | 1:3?" in other


def test_tools_with_and_without_a_template(tell: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    settings = ("environment.tools=HERE/my_tools.py:add", "task.reward=jetrl.rewards.text:last_integer")
    _, told = tell("tools", call, "It is 3.", prompt="1 + 2?", overrides=settings)
    assert f"user: 1 + 2?\npolicy: {call}\ntool add: 3\n" in told and "by jetrl.rewards.text:last_integer" in told
    # a fixture's tokenizer of bytes: every character of the rendered text is a token, special ones aside
    _, told = tell("tools", call, "It is 3.", prompt="1 + 2?", template=saved(tmp_path / "bytes"), overrides=(
        *settings, "task.max_prompt_length=900", "rollout.max_response_length=900",
        "train.max_tokens_per_gpu=2048",
    ))
    assert '| {"type": "function", "function": {"name": "add"' in told and "  | <|im_start|>assistant\n" in told
    assert f"policy ({len(call) + 1} tokens): {call}\ntool add: 3\n  rendered (" in told
    assert "\n  | \n  | <|im_start|>tool\n  | 3<|im_end|>\n" in told, "the turn's end token is not repeated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quickstart",), "quickstart: this recipe has no environment"),
        (("tols",), "no such file and no recipe of this name"),
        (("tools",), "recipe"),
        ((GUESS, ("environment.params.hihg=3",)), r"environment\.params\.hihg: .*did you mean 'high'"),
        (("nowhere.py:Env",), r"file nowhere\.py not found"),
    ],
)
def test_mistakes_are_one_message(arguments: tuple[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_trial(*arguments, data="tools" if arguments == ("tools",) else "")


def test_scripts_and_typed_turns(tmp_path: Path, tell: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    (tmp_path / "list.json").write_text('["a\\nb", "c"]')
    assert read_script(tmp_path / "lines.txt") == ["one", "two"]
    assert read_script(tmp_path / "list.json") == ["a\nb", "c"]
    for text in ('["a"', "[1]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=r"--script .*bad\.json"):
            read_script(tmp_path / "bad.json")
    said = iter(["x", "y"])

    def read(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    lines: list[str] = []
    assert try_out(prepare_trial(GUESS), Typed(read), lines.append) == 0
    assert sum(line.startswith("policy: ") for line in lines) == 2
    assert printable("a\x07\nü") == "a\\x07\nü"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--say", "x"), 0, "policy: x"), ((), 2, "turns are missing"),
        (("--say", "x", "--script", "f"), 2, "both give"),
        (("environment.params.low=x", "--say", "1"), 2, "failed by error"),
    ],
)
def test_the_command(
    arguments: tuple[str, ...], status: int, text: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["jetrl", "env", GUESS, *arguments])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    done = capsys.readouterr()
    assert (ended.value.code or 0) == status and text in done.out + done.err
