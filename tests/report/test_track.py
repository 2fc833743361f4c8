"""Trackers never end a run: what is refused before it, what is told once during it, and what each tracker gets."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl.config.sections import TrackConfig
from jetrl.errors import UserError
from jetrl.report import backends, track
from jetrl.report.backends import BACKENDS, MLflow
from jetrl.report.channel import Channel, Limits, cause
from jetrl.report.recorder import ROW_FILES, Recorder, read_metrics, sample_lines
from jetrl.report.track import TrackSettings, check_trackers, evenly, open_trackers, read_kept, table_rows

ROW = {"reward/mean": 0.5, "eval/addition/avg@1": 1.0}
FAST = Limits(opening=5.0, silence=0.05, closing=2.0, pauses=(), lost_in_a_row=3)
SAMPLE = {
    "prompt": "1+1=", "answer": "2", "completion": "2", "tokens": ["2"], "logprobs": [-0.5], "reward": 1.0,
    "advantage": None, "finish_reason": "stop",
}
VARIABLES = (
    "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_MODE", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_RUN_ID", "MLFLOW_RUN_NAME", "MLFLOW_TRACKING_URI", "WANDB_API_KEY", "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN",
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Fake:
    """A tracker whose calls run `act(step)`; it keeps what it took."""

    def __init__(
        self, act: Callable[[int], object] = lambda step: None, end: Callable[[], object] = lambda: None
    ) -> None:
        self.act, self.end = act, end
        self.kept: Mapping[str, str] = {"id": "x"}
        self.rows: list[tuple[int, Any]] = []
        self.closed: bool | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.act(step)
        self.rows.append((step, dict(metrics)))

    def samples(self, table: str, step: int, rows: Any) -> None:
        self.act(step)
        self.rows.append((step, (table, rows)))

    def close(self, failed: bool) -> None:
        self.end()
        self.closed = failed


def recorded(folder: Path, fake: Fake, steps: int, limits: Limits = FAST, pause: float = 0.02) -> list[str]:
    """A recorder with this tracker writes that many rows; what the user was told."""
    told: list[str] = []
    with Recorder(folder) as recorder:
        recorder.trackers.append(Channel("wandb", lambda: fake, told.append, limits))
        for step in range(1, steps + 1):
            recorder.write(step, ROW)
            time.sleep(pause)
    assert [row["step"] for row in read_metrics(folder)] == list(range(1, steps + 1))  # nothing of the run is lost
    return told


def test_a_tracker_gets_every_row_and_says_nothing(tmp_path: Path) -> None:
    fake = Fake()
    assert recorded(tmp_path / "r", fake, 5) == []
    assert fake.rows == [(step, ROW) for step in range(1, 6)] and fake.closed is False


ERRORS = [ConnectionError("503 from the server"), RuntimeError("a\nb"), SystemExit(3), KeyError("x"), BaseException()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_tracker_raises_is_told_once_and_the_run_goes_on(error: BaseException, tmp_path: Path) -> None:
    def act(step: int) -> None:
        if step >= 2:
            raise error

    fake = Fake(act)
    first, last = recorded(tmp_path / "r", fake, 9)
    assert first.startswith("wandb fails since step 2") and cause(error) in first and "continues" in first
    assert "lacks the rows of 8 steps (2, 3, 4, 5, ...)" in last and cause(error) in last
    assert "permissions" not in first + last and "\n" not in first + last
    assert [step for step, _ in fake.rows] == [1] and fake.closed is False


def test_a_tracker_that_recovers_gets_the_later_rows(tmp_path: Path) -> None:
    def act(step: int) -> None:
        if step in (2, 3):
            raise ConnectionError("login expired")

    fake = Fake(act)
    _, last = recorded(tmp_path / "r", fake, 6)
    assert [step for step, _ in fake.rows] == [1, 4, 5, 6] and "2 steps (2, 3)" in last


def test_a_row_is_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def act(step: int) -> None:
        tries.append(step)
        if len(tries) < 3:
            raise ConnectionError("busy")

    fake = Fake(act)
    assert recorded(tmp_path / "r", fake, 1, Limits(pauses=(0.01, 0.01)), pause=0.3) == []
    assert tries == [1, 1, 1] and fake.rows == [(1, ROW)]


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end(tmp_path: Path) -> None:
    free = threading.Event()
    fake = Fake(lambda step: step < 2 or free.wait(60))
    before = time.monotonic()
    told = recorded(tmp_path / "r", fake, 8, Limits(silence=0.05, closing=0.2, rows=3))
    assert time.monotonic() - before < 10
    free.set()
    assert "has not answered since step 2" in told[0] or "fails since step" in told[0]
    assert "waiting for wandb" in told[-2] and "lacks the rows of 7 steps (2, 3, 4, 5, ...)" in told[-1]
    assert len(told) == 3


def test_a_tracker_that_cannot_be_closed_is_told(tmp_path: Path) -> None:
    def end() -> None:
        raise SystemExit("no login")

    (told,) = recorded(tmp_path / "r", Fake(end=end), 2)
    assert told == "wandb has all rows, but could not be closed (SystemExit: no login)."
    free = threading.Event()
    told2 = recorded(tmp_path / "s", Fake(end=lambda: free.wait(60)), 2, Limits(closing=0.2))
    free.set()
    assert told2[-1] == "wandb has all rows, but could not be closed in time."


def test_a_failed_run_closes_its_tracker_as_failed(tmp_path: Path) -> None:
    fake = Fake()
    with pytest.raises(RuntimeError), Recorder(tmp_path / "r") as recorder:
        recorder.trackers.append(Channel("wandb", lambda: fake, print, FAST))
        raise RuntimeError("training")
    assert fake.closed is True


def test_the_cause_is_one_line_without_control_characters() -> None:
    assert cause(ValueError("\n\x1b[2Jbad\x07 key.\nmore")) == "ValueError: [2Jbad key"
    assert cause(KeyboardInterrupt()) == "KeyboardInterrupt" and len(cause(ValueError("x" * 999))) < 220


# ---- before the run ----


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_missing_package_is_told(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for attempt in (check_trackers, lambda settings: open_trackers(settings, tmp_path, {})):
        with pytest.raises(UserError, match=f"track.backends names {name}.*pip install {name}"):
            attempt(TrackSettings((name,)))


def test_an_error_inside_of_an_installed_package_is_not_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trackio.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(UserError, match="trackio, which cannot be imported .No module named 'not_there_at_all'"):
        check_trackers(TrackSettings(("trackio",)))


def fake_wandb(monkeypatch: pytest.MonkeyPatch, login: Callable[..., bool], **more: Any) -> None:
    module = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=None), login=login, errors=SimpleNamespace(Error=LookupError), **more
    )
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_without_login_is_told_before_the_run_and_offline_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def login(prompt: bool = True) -> bool:
        assert not prompt  # a run in the background cannot answer
        return False

    fake_wandb(monkeypatch, login)
    with pytest.raises(UserError, match="not logged in.*wandb login.*WANDB_MODE=offline"):
        check_trackers(TrackSettings(("wandb",)))

    def unreachable(timeout: int) -> bool:
        raise LookupError("no route to host")

    fake_wandb(monkeypatch, unreachable)
    with pytest.raises(UserError, match="LookupError: no route to host.*WANDB_API_KEY"):
        check_trackers(TrackSettings(("wandb",)))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(TrackSettings(("wandb",)))


@contextmanager
def server_that_answers(status: int) -> Iterator[str]:
    """Its address."""
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_trackio_s_places_are_tried_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """trackio itself only warns, once the model is loaded."""
    def told() -> str:
        try:
            check_trackers(TrackSettings(("trackio",)))
        except UserError as error:
            return str(error)
        return ""

    (tmp_path / "file").write_text("")
    for folder, wrong in ((tmp_path / "new" / "deep", ""), (tmp_path / "file" / "x", "its folder (TRACKIO_DIR)")):
        monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(TRACKIO_DIR=folder))
        assert wrong in told() and bool(wrong) == bool(told())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for status in (200, 401, 503):
        with server_that_answers(status) as url:
            monkeypatch.setenv("TRACKIO_SERVER_URL", f"{url}/?write_token=secret")
            assert bool(told()) == (status == 503) and "secret" not in told()
    assert f"cannot use the server {url}/ (TRACKIO_SERVER_URL): URLError" in told()  # it is gone
    monkeypatch.setenv("TRACKIO_SERVER_URL", url)
    assert "set TRACKIO_WRITE_TOKEN" in told()
    monkeypatch.setenv("TRACKIO_SERVER_URL", "127.0.0.1:99")
    assert "must begin with http" in told()

    def whoami() -> None:
        raise LookupError("not logged in")

    monkeypatch.setattr(backends.huggingface_hub, "whoami", whoami)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")  # it wins over the server
    assert "cannot use the Space me/space (TRACKIO_SPACE_ID): LookupError: not logged in" in told()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_a_tracker_raises_at_the_start_is_one_message(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=raises))
    with pytest.raises(UserError) as caught:
        open_trackers(TrackSettings(("trackio",)), tmp_path, {})
    assert "track.backends" in str(caught.value) and cause(error) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_that_hangs_at_the_start_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = threading.Event()
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: free.wait(60)))
    with pytest.raises(UserError, match="trackio .track.backends. has not answered in 0.1 s"):
        open_trackers(TrackSettings(("trackio",)), tmp_path, {}, limits=Limits(opening=0.1))
    free.set()


def test_an_open_tracker_is_closed_where_the_next_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = Fake()
    monkeypatch.setitem(BACKENDS, "trackio", lambda opening: fake)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_trackers(TrackSettings(("trackio", "wandb")), tmp_path, {}, limits=FAST)
    assert fake.closed is True


# ---- settings, variables, ids ----


class Calls(list):
    def __getattr__(self, name: str) -> Any:
        def call(*a: Any, **k: Any) -> Any:
            self.append((name, a, k))
            methods = {n: getattr(self, n) for n in ("log", "finish", "define_metric")}
            return SimpleNamespace(id=k.get("id"), **methods)

        return call


def opened(settings: TrackSettings, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which wandb or trackio is opened."""
    calls = Calls()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=calls.init))
    folder.mkdir(exist_ok=True)
    for channel in open_trackers(settings, folder, {"seed": 1}, limits=FAST):
        channel.close()
    return calls[0][2]  # type: ignore[no-any-return]


ALL = {"project": "p", "group": "g", "tags": ("a", "b"), "run_name": "n"}


def test_a_setting_wins_over_the_variable_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, full = TrackSettings(("wandb",)), TrackSettings(("wandb",), **ALL, entity="e")
    given = opened(plain, tmp_path / "run", "wandb", monkeypatch)
    assert (given["project"], given["name"], given["config"]) == ("jetrl", "run", {"seed": 1})
    assert given["entity"] is given["group"] is given["tags"] is None  # wandb reads its variables
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "theirs")
    given = opened(plain, tmp_path / "run", "wandb", monkeypatch)
    assert given["project"] is given["name"] is None
    given = opened(full, tmp_path / "run", "wandb", monkeypatch)
    assert [given[key] for key in ("project", "entity", "group", "tags", "name")] == ["p", "e", "g", ["a", "b"], "n"]
    given = opened(TrackSettings(("trackio",), **ALL), tmp_path / "run", "trackio", monkeypatch)
    assert [given[key] for key in ("project", "group", "name")] == ["p", "g", "n"]
    assert given["config"] == {"seed": 1, "tags": ["a", "b"]}


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_goes_on_in_its_tracker_also_when_moved(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = opened(TrackSettings((name,)), tmp_path / "run", name, monkeypatch)
    other = opened(TrackSettings((name,)), tmp_path / "other", name, monkeypatch)
    assert first[key] != other[key] and (name == "wandb" or first["resume"] == "never")
    (tmp_path / "run").rename(tmp_path / "moved")
    again = opened(TrackSettings((name,)), tmp_path / "moved", name, monkeypatch)
    assert again[key] == first[key] and again["resume"] == "allow"


def test_an_id_in_the_variable_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert opened(TrackSettings(("wandb",)), tmp_path / "run", "wandb", monkeypatch)["id"] == "mine"
    assert read_kept(tmp_path / "run") == {"wandb": {"id": "mine"}}


@pytest.mark.parametrize("text", ["", "[1]", '{"wandb": 3}', "{"])
def test_a_damaged_track_file_means_a_new_run(text: str, tmp_path: Path) -> None:
    (tmp_path / track.TRACK_FILE).write_text(text)
    assert read_kept(tmp_path) == {}


def test_settings_are_those_of_the_config() -> None:
    assert TrackSettings(**TrackConfig().model_dump()) == TrackSettings()
    given = TrackConfig(backends=("wandb",), project="p", tags=("a",))
    assert TrackSettings(**given.model_dump()).tags == ("a",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"project": "p"}, "track.project: has no effect"), ({"num_samples": 3}, "track.num_samples: has no effect"),
        ({"backends": ("tensorboard",), "run_name": "n"}, "track.run_name: has no effect"),
        ({"backends": ("tensorboard", "mlflow"), "entity": "e"}, "track.entity: only wandb"),
    ],
)
def test_a_setting_that_no_named_tracker_has_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrackConfig(**given)


# ---- tables ----


def test_tables_have_the_same_columns_in_each_row_and_none_where_nothing_was_scored() -> None:
    rows = [SAMPLE, {**SAMPLE, "reward": None, "rewards": {"right": None, "form": 0.5}, "extra": {"parsed": [1]}}]
    first, second = table_rows(sample_lines(4, rows))
    assert list(first) == list(second) and first["step"] == 4 and "tokens" not in first
    assert (first["rewards/right"], first["reward"]) == (None, 1.0)
    assert (second["reward"], second["rewards/right"]) == (None, None)
    assert (second["rewards/form"], second["extra/parsed"]) == (0.5, "[1]")
    (long,) = table_rows(sample_lines(1, [{**SAMPLE, "completion": "x" * 9000}]))
    assert len(long["completion"]) < 4100 and long["completion"].endswith("(5,000 more characters)")


def test_a_bounded_number_of_samples_is_sent(tmp_path: Path) -> None:
    fake = Fake()
    with Recorder(tmp_path / "r") as recorder:
        recorder.trackers.append(Channel("wandb", lambda: fake, print, FAST))
        recorder.tracked_samples = 4
        recorder.write(3, ROW)
        recorder.write_samples(3, [{**SAMPLE, "completion": str(i)} for i in range(16)])
    (_, (table, rows)) = fake.rows[1]
    assert table == "samples" and [row["completion"] for row in rows] == ["0", "4", "8", "12"]
    assert evenly([b"a", b"b"], 5) == [b"a", b"b"] and evenly([b"a"], 0) == [] == evenly([], 3)


def test_every_file_of_completions_is_a_table_of_the_trackers(tmp_path: Path) -> None:
    fake, names = Fake(), [name for name in ROW_FILES if name.endswith("samples.jsonl")]
    with Recorder(tmp_path / "r") as recorder:
        recorder.trackers.append(Channel("wandb", lambda: fake, print, FAST))
        recorder.tracked_samples = 2
        recorder.write(2, ROW)
        recorder.write_samples(2, [SAMPLE] * 3)
        recorder.write_eval_samples(2, [{**SAMPLE, "completion": str(i)} for i in range(6)])
    tables = {table: rows for _, (table, rows) in fake.rows[1:]}
    assert sorted(tables) == sorted(Path(name).stem for name in names) and len(names) > 1
    assert [row["completion"] for row in tables["eval_samples"]] == ["0", "3"]


def test_what_no_row_has_is_no_column_and_only_a_score_can_be_missing(tmp_path: Path) -> None:
    unscored = {**SAMPLE, "reward": None, "advantage": None, "answer": None, "rewards": {"right": None}}
    first, _ = table_rows(sample_lines(1, [unscored, unscored]))
    assert first["reward"] is None and first["rewards/right"] is None
    assert not {"advantage", "answer", "prompt_rendered"} & set(first)
    mixed = table_rows(sample_lines(1, [{**unscored, "prompt_rendered": "<s>1+1="}, unscored]))
    assert [row["prompt_rendered"] for row in mixed] == ["<s>1+1=", None]
    texts: list[str] = []
    board = object.__new__(BACKENDS["tensorboard"])
    board._writer = SimpleNamespace(add_text=lambda table, text, step: texts.append(text))
    board.samples("samples", 1, mixed)
    assert texts[0].count("not scored") == 4  # reward and rewards/right of both rows
    assert texts[0].count("**prompt_rendered**") == 1 and "**advantage**" not in texts[0]


# ---- the libraries themselves, without a network ----


def used(settings: TrackSettings, folder: Path, steps: range, first: int = 0) -> list[str]:
    told: list[str] = []
    folder.mkdir(exist_ok=True)
    config = {"seed": 1, "model": {"path": "x" * 700}, "at@": {"a b": [1, 2]}}
    check_trackers(settings)
    lines = sample_lines(1, [{**SAMPLE, "rewards": {"right": None}}, {**SAMPLE, "completion": "*a* <b>\n\n    c"}])
    for channel in open_trackers(settings, folder, config, first=first, tell=told.append):
        for step in steps:
            channel.log(step, ROW | {"reward/mine.py:f/mean": float(step), "nan": float("nan")})
            channel.samples("samples", step, lambda: table_rows(lines))
        channel.close()
    return told


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert used(TrackSettings(("tensorboard",)), tmp_path / "run", range(1, 6)) == []
    time.sleep(1.1)  # the names of event files have seconds
    assert used(TrackSettings(("tensorboard",)), tmp_path / "run", range(4, 7), first=4) == []  # steps 4 and 5 again
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("eval/addition/avg@1")] == [1, 2, 3, 4, 5, 6]
    (text, *_) = events.Tensors("samples/text_summary")
    content = text.tensor_proto.string_val[0].decode()
    assert "**rewards/right**\n\n    not scored" in content and "\n    *a* <b>\n" in content


def test_mlflow_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/m.db")
    settings = TrackSettings(("mlflow",), project="p", group="g", tags=("a", "k=v"))
    assert used(settings, tmp_path / "run", range(1, 4)) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert used(settings, tmp_path / "moved", range(3, 6), first=3) == []
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert {"a": "true", "k": "v", "group": "g"}.items() <= run.data.tags.items()
    assert run.data.params["seed"] == "1" and len(run.data.params["model.path"]) == 500
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "eval/addition/avg_at_1")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5] and "reward/mine.py_f/mean" in run.data.metrics
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step_000001.json")).read_text())
    assert "rewards/right" in table["columns"] and len(table["data"]) == 2
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(UserError, match="mlflow has no run .*other.db.*track.json"):
        used(settings, tmp_path / "moved", range(1))


def test_trackio_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    settings = TrackSettings(("trackio",), project="p", group="g")
    assert used(settings, tmp_path / "run", range(1, 4)) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert used(settings, tmp_path / "moved", range(3, 6), first=3) == []
    (run,) = trackio.Api().runs("p")
    assert run.name == "run"


def test_wandb_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    settings = TrackSettings(("wandb",), project="p", tags=("a",))
    assert used(settings, tmp_path / "run", range(1, 4)) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert used(settings, tmp_path / "moved", range(3, 6), first=3) == []
    folders = [path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2 and set(folders) == {read_kept(tmp_path / "moved")["wandb"]["id"]}


def test_the_limits_of_mlflow() -> None:
    params = MLflow.params_of({"a": {"b@c": "x" * 2000, "none": None, "list": [1, "é"]}})
    assert params == {"a.b_at_c": "x" * 496 + " ...", "a.list": '[1, "é"]'}
