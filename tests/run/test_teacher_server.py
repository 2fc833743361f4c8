"""Distillation from a teacher behind a URL, here `jetrl serve` on a CPU: the bits of the same teacher in the run, what
is refused before anything is built, and a server that goes away in the middle of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from serving import Served, served

pytest.importorskip("starlette", reason="needs the extra serve")

from jetrl.errors import UserError  # noqa: E402
from jetrl.parallel.world import World  # noqa: E402
from jetrl.run.loop import StopRequest, run  # noqa: E402
from jetrl.run.prepare import prepare  # noqa: E402
from jetrl.run.replay.checks import replay  # noqa: E402
from jetrl.train.teacher_server import TeacherServer  # noqa: E402
from tests.tiny import ARCH, numbers, saved, tiny_config, tiny_run  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run of one step."""
    folder = tiny_run(tmp_path_factory.mktemp("teacher"), {
        "train.steps": 1, "checkpoint.save_interval": 1, "eval.eval_interval": 0,
    })
    return folder / "checkpoints" / "step_000001" / "model"


@pytest.fixture(scope="module")
def server(teacher: Path) -> Iterator[Served]:
    with served(teacher) as running:
        yield running


def distilling(path: str | Path, **more: Any) -> dict[str, Any]:
    """Changes for a student of one layer; `served` computes in FP8."""
    return {
        "rl.algo": "distill", "teacher.path": str(path), "model.arch": ARCH | {"num_hidden_layers": 1},
        "eval.eval_interval": 0, "rl.updates_per_step": 2, "train.steps": 4, "train.share_prompts": True,
    } | more


def same_bits(one: Path, other: Path, step: int = 4) -> None:
    assert numbers(one) == numbers(other)
    before, after = saved(one, step), saved(other, step)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.fixture(scope="module")
def here(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that has its teacher itself."""
    return tiny_run(tmp_path_factory.mktemp("here"), distilling(teacher, **{"teacher.precision": "fp8"}))


def test_our_server_gives_the_bits_of_the_teacher_in_the_run(here: Path, server: Served, tmp_path: Path) -> None:
    there = tiny_run(tmp_path, distilling(server.url))
    same_bits(here, there)
    assert all(row["policy/teacher_kl"] != 0 for row in numbers(there)[1:])
    found = replay(there, 4, "update")
    assert found.same and found.checked, found


def test_a_server_names_the_same_tokens_as_the_teacher_in_the_run(
    teacher: Path, server: Served, tmp_path: Path
) -> None:
    """With `teacher.top_k`; a replay says what it lacks."""
    several = {"teacher.top_k": 3, "train.steps": 2}
    one = tiny_run(tmp_path / "here", distilling(teacher, **several, **{"teacher.precision": "fp8"}))
    other = tiny_run(tmp_path / "there", distilling(server.url, **several))
    same_bits(one, other, 2)
    assert all(row["policy/teacher_kl_top_k"] > 0 for row in numbers(other)[1:])
    with pytest.raises(UserError, match="cannot be made again: teacher.top_k = 3, and what http"):
        replay(other, 2, "update")


def test_a_server_that_dies_costs_one_step(
    here: Path, teacher: Path, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message, the finished steps are saved, and the run goes on with a server at another address, if it has the
    same model."""
    changes = {"checkpoint.save_interval": 4}
    judge, calls = TeacherServer.judge, list[int]()
    with ExitStack() as running:
        first = running.enter_context(served(teacher))

        def dies(self: TeacherServer, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                running.close()
                self.timeout = 1.0  # in place of the recipe's, for a test that waits no longer
            return judge(self, *args)

        monkeypatch.setattr(TeacherServer, "judge", dies)
        with pytest.raises(UserError, match=r"teacher.path = http:.*within teacher.timeout = 1 s. Start the server"):
            tiny_run(tmp_path / "parts", distilling(first.url, **changes))
    run_dir = tmp_path / "parts" / "runs" / "tiny"
    assert [row["step"] for row in numbers(run_dir)] == [0, 1, 2, 3] and saved(run_dir, 3)
    with pytest.raises(UserError, match=r"refused. Is it running there\?"):
        tiny_run(tmp_path / "parts", distilling(first.url, **changes) | {"checkpoint.resume": "auto"})
    changed = r"teacher.path \(http.*: the content has changed"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=changed):
        patch.setattr(TeacherServer, "base_digest", "of another model")
        tiny_run(tmp_path / "parts", distilling(server.url, **changes) | {"checkpoint.resume": "auto"})
    assert server.url != first.url
    tiny_run(tmp_path / "parts", distilling(server.url, **changes) | {"checkpoint.resume": "auto"})
    same_bits(here, run_dir)


def test_a_served_teacher_that_cannot_judge_is_refused_before_anything_is_built(
    teacher: Path, server: Served, tmp_path: Path
) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(tiny_config(tmp_path, distilling(server.url, **changes)))
        return str(caught.value)

    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    data = json.loads((other / "tokenizer.json").read_text())
    words = data["model"]["vocab"]
    a, b = [word for word, number in words.items() if number in (5, 6)]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(data))
    assert "has another vocabulary than the policy: id 5 is '" in refused(
        **{"model.path": str(other), "model.arch": None, "model.tokenizer": None})
    assert "takes 64 tokens (max_model_len), and task.max_prompt_length" in refused(
        **{"model.arch": ARCH | {"max_position_embeddings": 128}, "rollout.max_response_length": 60})
    assert "status 400: prompt[0]" in refused(**{"model.arch": ARCH | {"vocab_size": 500}})


@pytest.mark.parametrize(("changes", "said"), [
    ({"teacher.path": "http://"}, "teacher.path: must be the address of a server, such as http://127.0.0.1:8000, got"),
    ({"teacher.path": "http://a:b"}, "teacher.path: must be the address of a server"),
    ({"teacher.path": "https://me:word@a"}, "must not hold a name or a password; a key is read from JETRL_TEACHER_KEY"),
    ({"teacher.precision": "fp8"}, "teacher.precision: has no effect while every teacher is behind an address"),
    ({"teacher.revision": "main"}, "teacher.revision: has no effect while teacher.path is an address"),
    ({"teacher.path": "x", "teacher.timeout": 5.0}, "teacher.timeout: has no effect while no teacher is behind an"),
    ({"rollout.temperature": 0.7}, "rollout.temperature: a teacher behind an address gives log-probs at temperature 1"),
    ({"rollout.top_p": 0.9}, "rollout.logprobs: a teacher behind an address gives log-probs of the whole distribution"),
], ids=str)
def test_settings_that_do_not_go_with_a_server(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        tiny_config(tmp_path, distilling("http://127.0.0.1:9") | changes)


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


@pytest.mark.slow
def test_each_rank_asks_for_what_it_holds(server: Served, tmp_path: Path) -> None:
    fixed = {"train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "train.steps": 2}
    alone = tiny_run(tmp_path / "alone", distilling(server.url, **fixed))
    assert run_ranks(rank_run, 2, tmp_path, distilling(server.url, **fixed)) == [True, True]
    same_bits(alone, tmp_path / "runs" / "tiny", 2)
