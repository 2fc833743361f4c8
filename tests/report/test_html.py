"""The page: complete in itself, safe against what models write, and true to the run folders."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import ATTACK, drawn, needs_browser, section

from jetrl.errors import UserError
from jetrl.report.html import MAX_POINTS, config_differences, script_json, thin, write_report
from jetrl.report.recorder import Recorder, read_samples
from jetrl.report.run import headline, load_runs
from jetrl.report.samples import MAX_SAMPLES, MAX_TOKENS, choose_samples, sample_note
from jetrl.report.text import duration

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script><text>qkv</text></svg>'


class Page(HTMLParser):
    """Tags, texts, and the contents of the scripts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._in = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def test_headline_numbers_of_one_run(make_run, tmp_path: Path) -> None:
    run = make_run("add-fp8", steps=40)
    page = Page(write_report([run], tmp_path / "deep" / "report.html"))
    numbers = headline(load_runs([run])[0])
    assert "add-fp8" in page.text and "Qwen3-0.6B" in page.text and "NVIDIA H200" in page.text
    assert f"3.1% → {100 * numbers.accuracy_after:.1f}%" in page.text
    assert "exactly 0 in all 40 steps" in page.text
    assert duration(numbers.seconds) in page.text and f"{numbers.tokens_per_s:,.0f}" in page.text
    seconds = sum(value for row in load_runs([run])[0].rows for key, value in row.items() if key.startswith("time/"))
    assert numbers.seconds == pytest.approx(seconds, rel=1e-12)


def test_one_gap_among_many_exact_steps_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Recorder(run) as recorder:
        for step in range(1, 5001):
            recorder.write(step, {"reward/mean": 0.5, "parity/logprob_abs_diff_max": 1.2e-7 if step == 2222 else 0.0})
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "1.2e-07" in page.text and "not 0 in 1 of 5,000 steps" in page.text and "exactly 0" not in page.text
    curve = page.data["runs"][0]["series"]["parity/logprob_abs_diff_max"]
    assert len(curve[0]) == MAX_POINTS and max(curve[1]) == 1.2e-7 and curve[0][-1] == 5000  # binning keeps the gap
    assert "drawn in 1500 bins" in page.text


def test_nan_parity_is_never_called_exact(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(1, {"parity/logprob_abs_diff_max": 0.0})
        recorder.write(2, {"parity/logprob_abs_diff_max": math.nan})
    page = Page(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "not 0 in 1 of 2 steps" in page.text and "exactly 0" not in page.text
    assert page.data["runs"][0]["series"]["parity/logprob_abs_diff_max"] == [[1, 2], [0.0, None]]


def test_steps_without_parity_are_counted_apart(tmp_path: Path) -> None:
    """Step 0 is no training step; step 2 made no update."""
    with Recorder(tmp_path / "run") as recorder:
        for step in range(4):
            recorder.write(step, {"parity/logprob_abs_diff_max": 0.0} if step in (1, 3) else {"reward/mean": 0.5})
    page = Page(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "exactly 0 in all 2 steps; 1 step had nothing to compare" in page.text
    numbers = headline(load_runs([tmp_path / "run"])[0])
    assert (numbers.parity_steps, numbers.parity_missing) == (2, 1)
    with Recorder(tmp_path / "never") as recorder:
        recorder.write(1, {"reward/mean": 0.5})
    numbers = headline(load_runs([tmp_path / "never"])[0])
    assert (numbers.parity_max, numbers.parity_missing) == (None, 0), "not measured at all"


def test_samples_cannot_break_out_of_the_page(make_run, tmp_path: Path) -> None:
    run = make_run("<img src=x onerror=alert(1)>", steps=10)
    page = Page(write_report([run], tmp_path / "report.html"))
    assert len(page.scripts) == 2 and [tag for tag, _ in page.tags].count("script") == 2
    assert "<img src=x" not in page.source and "document.title='broken'</script>" not in page.source
    assert not set("<>&") & set(page.scripts[0])
    first = page.data["runs"][0]["samples"]["steps"][0]["groups"][0]["rows"][0]
    assert "".join(first["t"]).startswith("</script><script>document.title='broken'")  # and yet nothing is lost
    assert page.data["runs"][0]["label"] == "<img src=x onerror=alert(1)>" and "<img src=x" in page.text


def test_script_json_is_safe_and_lossless() -> None:
    value = {"a": ["</script>", "<!--", "&amp;", "\u2028\u2029", "π"], "b": 1.5}
    text = str(script_json(value))
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == value
    with pytest.raises(ValueError):
        script_json({"a": math.nan})


def test_the_page_loads_nothing(make_run, tmp_path: Path) -> None:
    page = Page(write_report([make_run("a"), make_run("b", seed=1)], tmp_path / "r.html", {"flow": SVG}))
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "@import" not in page.source and "fetch(" not in page.source
    assert not re.search(r"url\((?!#)", page.source), "url(#...) is a place on the page itself"
    assert set(re.findall(r"https?://[^\s\"'<]+", page.source)) == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_flow_pictures_are_images_given_or_found(make_run, tmp_path: Path) -> None:
    run, other = make_run("a"), make_run("b")
    (run / "flow.svg").write_text(SVG)
    (other / "flow.svg").write_text(SVG)

    def flows(page: Page) -> list[str]:
        sources = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
        return [base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode() for source in sources]

    found = Page(write_report([run, other], tmp_path / "r.html"))
    assert flows(found) == [SVG] and "a, b" in found.text and "alert(1)" not in found.source  # equal flows once
    given = Page(write_report([run], tmp_path / "r.html", {"BF16": SVG.replace("qkv", "other")}))
    assert flows(given) == [SVG.replace("qkv", "other")] and "BF16" in given.text


def test_runs_are_compared_with_their_config_differences(make_run, tmp_path: Path) -> None:
    folders = [make_run("x-fp8"), make_run("x-rollout", precision="fp8_rollout", seed=1)]
    page = Page(write_report(folders, tmp_path / "r.html"))
    assert "2 runs compared" in page.text and "exactly 0 in all 40 steps" in page.text
    assert "not 0 in 40 of 40 steps" in page.text
    assert [run["label"] for run in page.data["runs"]] == ["x-fp8", "x-rollout"]
    assert config_differences(load_runs(folders)) == [("precision", ['"fp8"', '"fp8_rollout"']), ("seed", ["0", "1"])]


def test_runs_of_one_name_are_told_apart(make_run, tmp_path: Path) -> None:
    first, second = make_run("one"), make_run("two")
    (second / "config.toml").write_text('name = "one"\n')
    assert [run.label for run in load_runs([first, second])] == ["one", "two"]
    shutil.copytree(first, tmp_path / "copy" / "one")
    copy = tmp_path / "copy" / "one"
    assert [run.label for run in load_runs([first, copy])] == [str(first), str(copy)]
    with pytest.raises(UserError, match="given twice"):
        load_runs([first, first])


def test_samples_are_chosen_evenly_in_whole_groups(make_rows) -> None:
    rows = [{"step": step, **row} for step in range(1, 101) for row in make_rows(step, 100)]  # 3 groups of 4 a step
    chosen = choose_samples(rows, MAX_SAMPLES)
    assert (chosen["kept"], chosen["total"]) == (400, 1200)
    assert [one["step"] for one in chosen["steps"]] == list(range(1, 101))
    assert all(len(group["rows"]) == 4 for one in chosen["steps"] for group in one["groups"])
    few = choose_samples(rows, 20)
    assert [one["step"] for one in few["steps"]] == [1, 26, 51, 75, 100] and few["kept"] == 20
    assert choose_samples(rows, 3)["kept"] == 3  # a group that is larger than the limit is cut
    everything = choose_samples(rows[:36], MAX_SAMPLES)
    assert everything["kept"] == 36 and [len(one["groups"]) for one in everything["steps"]] == [3, 3, 3]
    assert choose_samples([], 400) == {"steps": [], "kept": 0, "total": 0, "cut": 0}


def test_equal_prompts_side_by_side_stay_two_groups(make_rows) -> None:
    first = make_rows(1, 10)[:4]
    rows = [{"step": 1, **row, "group": group} for group in (0, 1) for row in first]
    assert [len(group["rows"]) for group in choose_samples(rows, 400)["steps"][0]["groups"]] == [4, 4]


def test_limits_are_told_on_the_page(make_rows, tmp_path: Path) -> None:
    long = {**make_rows(2, 10)[0], "tokens": ["ab"] * 2000, "logprobs": [-0.5] * 2000, "completion": "ab" * 2000}
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 51):
            recorder.write(step, {"reward/mean": 0.0})
            recorder.write_samples(step, make_rows(step, 50) if step < 50 else [long])
    page = Page(write_report([tmp_path / "run"], tmp_path / "r.html"))
    samples = page.data["runs"][0]["samples"]
    assert f"{samples['kept']} of the 589 recorded samples, chosen evenly" in page.text and samples["kept"] <= 400
    assert "1 of them are cut after 1,500 tokens of the policy" in page.text
    (row,) = samples["steps"][-1]["groups"][0]["rows"]
    assert len(row["t"]) == len(row["l"]) == MAX_TOKENS and row["n"] == 2000 and "c" not in row


def test_conversations_go_by_turns_and_failed_ones_join_their_group(make_run, tmp_path: Path) -> None:
    page = Page(write_report([make_run("guess", conversations=True, steps=10)], tmp_path / "r.html"))
    steps = page.data["runs"][0]["samples"]["steps"]
    assert [len(one["groups"]) for one in steps] == [4, 4, 4]  # three plain ones, and the game with its failed member
    written = [row for row in read_samples(tmp_path / "runs" / "guess") if "turns" in row and row["step"] == 10]
    game = steps[-1]["groups"][-1]
    assert game["prompt"] == written[0]["prompt"] and len(game["rows"]) == len(written) == 5
    for shown, row in zip(game["rows"], written, strict=True):
        policy = [turn for turn in shown["turns"] if turn["by"] == "policy"]
        assert [turn["by"] for turn in shown["turns"]] == [turn["author"] for turn in row["turns"]]
        assert [token for turn in policy for token in turn["t"]] == row["tokens"]
        assert [turn["r"] for turn in shown["turns"]] == [turn.get("reward") for turn in row["turns"]]
        if "advantages" in row:
            assert [v for turn in policy for v in turn["v"]] == [round(v, 5) for v in row["advantages"]]
        texts = [turn["c"] for turn in shown["turns"] if turn["by"] == "environment"]
        assert texts == [turn["text"] for turn in row["turns"] if turn["author"] == "environment"]
        assert shown["f"] == row["finish_reason"] and "t" not in shown and all("c" not in turn for turn in policy)
    last = game["rows"][-1]
    assert (last["f"], last["r"], last["a"]) == ("error", None, None) and last["e"].startswith("ConnectionError")
    assert "All 51 recorded samples." in page.text  # three steps of 3 x 4 + 5


def talk(tokens: Sequence[int], texts: Sequence[str], **changes: Any) -> dict[str, Any]:
    """A row of turns: so many tokens of the policy, then that text of the environment, and so on."""
    turns: list[dict[str, Any]] = []
    for number, text in zip(tokens, texts, strict=True):
        turns.append({"author": "policy", "text": "a" * number, "tokens": ["a"] * number, "logprobs": [-0.5] * number})
        turns.append({"author": "environment", "text": text})
    row = {"step": 1, "group": 1, "prompt": "p", "answer": "", "completion": "", "reward": 1.0, "advantage": 0.0}
    lists = {"tokens": ["a"] * sum(tokens), "logprobs": [-0.5] * sum(tokens)}
    return {**row, **lists, "finish_reason": "turns", "turns": turns, **changes}


def test_long_conversations_are_cut_and_say_so() -> None:
    chosen = choose_samples([talk([1000, 700, 9], ["x" * 5000, "y" * 5000, "z"]), talk([1], ["x"])], 10)
    first, second = chosen["steps"][0]["groups"][0]["rows"]
    assert [len(turn["t"]) for turn in first["turns"][::2]] == [1000, 500, 0]
    assert [len(turn["c"]) for turn in first["turns"][1::2]] == [5000, 3000, 0]
    assert [turn["n"] for turn in first["turns"]] == [1000, 5000, 700, 5000, 9, 1]  # the page tells what is missing
    assert [turn["n"] for turn in second["turns"]] == [1, 1] and chosen["cut"] == 1
    limits = "1 of them are cut after 1,500 tokens of the policy or 8,000 characters of the environment."
    assert sample_note([chosen]) == f"All 2 recorded samples. {limits}"


def test_a_conversation_with_its_own_prompt_keeps_it() -> None:
    chosen = choose_samples([talk([1], ["x"]), talk([1], ["x"], prompt="q")], 10)
    (group,) = chosen["steps"][0]["groups"]
    assert group["prompt"] == "p" and "p" not in group["rows"][0] and group["rows"][1]["p"] == "q"


def test_rows_of_before_conversations_are_read(tmp_path: Path) -> None:
    """Without `group` (the oldest), `turns`, `advantages` and `error`."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    row = {"step": 1, "prompt": "1+1=", "answer": "2", "completion": "2", "tokens": ["2"], "logprobs": [-0.5]}
    row |= {"reward": 1.0, "advantage": 0.5, "finish_reason": "stop"}
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row | {"prompt": p}) + "\n" for p in ("a", "a", "b")))
    page = Page(write_report([tmp_path], tmp_path / "r.html"))
    groups = page.data["runs"][0]["samples"]["steps"][0]["groups"]
    assert [(group["prompt"], len(group["rows"])) for group in groups] == [("a", 2), ("b", 1)]
    assert groups[0]["rows"][0] == {"n": 1, "r": 1.0, "a": 0.5, "f": "stop", "t": ["2"], "l": [-0.5]}


def test_bins_keep_the_largest_of_maxima_and_the_mean_of_shares() -> None:
    steps, values = list(range(3000)), [float(i % 2) for i in range(3000)]
    kinds = ("environment/turns_max", "response_length/max", "parity/k3_kl", "environment/frac_max_turns")
    assert [set(thin(key, steps, values)[1]) for key in kinds] == [{1.0}, {1.0}, {1.0}, {0.5}]


def test_thin_keeps_short_curves_exactly() -> None:
    assert thin("reward/mean", [1, 2], [0.25, math.inf]) == [[1, 2], [0.25, None]]
    steps, values = thin("reward/mean", list(range(3000)), [float(i % 2) for i in range(3000)])
    assert len(steps) == MAX_POINTS and set(values) == {0.5}


def test_a_run_without_config_samples_or_parity_still_has_a_page(tmp_path: Path) -> None:
    with Recorder(tmp_path / "bare") as recorder:
        recorder.write(1, {"reward/mean": 0.5})
    page = Page(write_report([tmp_path / "bare"], tmp_path / "r.html"))
    assert "bare" in page.text and page.text.count("not measured") == 4


def test_mistakes_are_told(make_run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder given"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(UserError, match="not a run folder"):
        write_report([tmp_path], tmp_path / "r.html")
    run = make_run("a")
    with pytest.raises(UserError, match="cannot write"):
        write_report([run], run / "config.toml" / "r.html")
    (run / "config.toml").write_text("name = ")
    with pytest.raises(UserError, match="cannot be read"):
        write_report([run], tmp_path / "r.html")
    Recorder(tmp_path / "empty").close()
    with pytest.raises(UserError, match="no steps yet"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")


def clicking(page: Path, *nodes: str) -> Path:
    """The page with clicks on these nodes (JavaScript) after its start."""
    head, _, tail = page.read_text(encoding="utf-8").rpartition("start();")
    page.write_text(head + "start();" + "".join(f"{node}.click();" for node in nodes) + tail, encoding="utf-8")
    return page


@needs_browser
def test_a_browser_draws_the_page(make_run, tmp_path: Path) -> None:
    folders = [make_run("fp8"), make_run("rollout", precision="fp8_rollout")]
    text = drawn(write_report(folders, tmp_path / "r.html", {"flow": SVG}), tmp_path)
    assert "<title>2 runs · jetrl report</title>" in text
    assert text.count('class="card chart') == 7 and "NaN" not in text
    assert text.count("exactly 0 in all 40 steps</b>") == 1 and text.count("not 0 in 40 of 40 steps</b>") == 1
    assert 'class="completion"' in text and "rgba(var(--heat)" in text and 'class="turn' not in text
    assert re.search(r'id="failed-box" hidden', text)  # nothing failed in these runs


def with_rows(folder: Path, rows: list[dict[str, float]]) -> Path:
    with Recorder(folder) as recorder:
        for step, row in enumerate(rows, start=1):
            recorder.write(step, row)
    return folder


@needs_browser
@pytest.mark.parametrize("keys", [
    ["eval/addition/avg@1", "eval/addition/right/avg@1", "eval/addition/mine.py:form/avg@1"],
    ["eval/a/avg@4", "eval/b/avg@4", "eval/a/f/avg@4", "eval/b/f/avg@4"],
    ["eval/a/avg@1", "eval/a/avg@4", "eval/a/f/avg@1", "eval/a/f/avg@4"],
], ids=["functions", "sets", "numbers of samples"])
def test_no_two_curves_have_one_title(keys: list[str], tmp_path: Path) -> None:
    row = {"reward/mean": 0.5, "reward/f/mean": 0.5, "reward/g/mean": 1.0, "policy/entropy": 1.0}
    run = with_rows(tmp_path / "run", [row | dict.fromkeys(keys, 0.25), row])
    text = drawn(write_report([run], tmp_path / "r.html"), tmp_path)
    titles = re.findall(r"<h3>(.*?)</h3>", text.split('id="more"')[0])
    assert len(titles) == len(set(titles)), titles
    assert sum(title.startswith("Held-out") for title in titles) == len(keys), titles
    ends = [key.split("/")[2] for key in keys if key.count("/") == 3]
    assert all(any(f" {end}" in title for title in titles) for end in ends)


@needs_browser
@pytest.mark.parametrize("values", [
    [3.4451, 3.4449, 3.445], [0.0, 1.0, 0.5], [123456.1, 123456.2, 123456.3], [2.00001e-4, 2.00002e-4, 2.00003e-4],
    [-0.900001, -0.900002, -0.900003],
], ids=str)
def test_no_two_ticks_of_an_axis_have_one_label(values: list[float], tmp_path: Path) -> None:
    keys = ("reward/mean", "policy/entropy", "eval/addition/avg@1", "response_length/frac_truncated")
    run = with_rows(tmp_path / "run", [dict.fromkeys(keys, value) for value in values])
    text = drawn(write_report([run], tmp_path / "r.html"), tmp_path)
    axes = [re.findall(r'text-anchor="end">([^<]*)<', part) for part in text.split("<svg")[1:]]
    axes = [labels for labels in axes if len(labels) > 1]
    assert len(axes) >= len(keys)
    for labels in axes:
        assert len(set(labels)) == len(labels), labels


@needs_browser
def test_a_browser_draws_what_several_ranks_measure(make_run, tmp_path: Path) -> None:
    run = make_run("ranks", steps=10)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row |= {"perf/communication_s": 0.5, "perf/memory_peak_gib_max": 98.0, "perf/rank_idle_max_s": 2.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = drawn(write_report([run], tmp_path / "r.html"), tmp_path)
    for title in ("GPU memory", "Communication", "Idle ranks"):
        assert text.count(f"<h3>{title}</h3>") == 1, title


@needs_browser
def test_a_browser_draws_conversations(make_run, tmp_path: Path) -> None:
    run = make_run("guess", conversations=True, steps=10)
    page = write_report([run], tmp_path / "r.html")
    text = drawn(clicking(page, "document.querySelector('#groups').lastElementChild"), tmp_path)
    text = text.replace(section(text, "traces"), "")
    rows = [row for row in read_samples(run) if row["step"] == 10 and "turns" in row]
    turns = [turn for row in rows for turn in row["turns"]]
    for author in ("policy", "environment"):
        assert text.count(f'class="turn {author}"') == sum(turn["author"] == author for turn in turns)
    assert text.count("<b>Environment</b>") == sum(turn["author"] == "environment" for turn in turns)
    assert text.count("reward <b class=\"bad\">-0.05</b>") == sum(turn.get("reward") == -0.05 for turn in turns)
    assert text.count("error: ConnectionError: the server closed the line") == 1 and "1 failed" in text
    titles = ("Turns", "Out of turns", "Prompts sampled", "Explained variance", "Environment errors")
    assert all(f"<h3>{title}</h3>" in text for title in titles) and "Environment time-outs" not in text
    assert re.search(r'id="failed-box">', text) and "NaN" not in text


@needs_browser
def test_the_browser_shows_failed_ones_only_with_the_whole_error(tmp_path: Path) -> None:
    error = "KeyError: 'x'\n  at line 3 of <game>"
    failed = {"reward": None, "advantage": None, "finish_reason": "timeout", "error": error, "prompt": "another"}
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(1, {"reward/mean": 1.0})
        recorder.write_samples(1, [talk([3], ["kept"]), talk([2], ["lost"], **failed), talk([1], ["other"], group=2)])
        recorder.write_samples(2, [talk([1], ["later"])])
    page = write_report([tmp_path / "run"], tmp_path / "r.html")
    text = section(drawn(clicking(page, "$('failed-only')", "$('plain-text')"), tmp_path), "samples")
    assert text.count('class="turn policy"') == 1 and ">lost</div>" in text and ">kept</div>" not in text
    assert "no reward · 1 failed" in text and "mean reward" not in text
    assert '<b class="bad">time-out: KeyError: \'x\'</b>' in text
    assert f'<p class="failure">{error.replace("<", "&lt;").replace(">", "&gt;")}</p>' in text
    assert re.findall(r"<option[^>]*>(\d)</option></select>", text) == ["1"]  # step 2 has no failed one


def traced(folder: Path, *rows: dict[str, Any]) -> Path:
    """The page of a run whose only step has these rows."""
    with Recorder(folder / "run") as recorder:
        recorder.write(1, {"reward/mean": 1.0})
        recorder.write_samples(1, rows)
    return write_report([folder / "run"], folder / "r.html")


def test_the_page_has_roles_versions_and_branches_within_its_limits(tmp_path: Path) -> None:
    row = talk([2, 1], ["x" * 7000, "y" * 3000], prompt="ab\ncd", prompt_roles=[["system", 0], ["user", 3]])
    row["turns"][0]["versions"], row["turns"][2]["after"] = [[0, 7]], -1
    row["turns"][1]["roles"], row["turns"][3]["roles"] = [["tool", 0], ["user", 6500]], [["tool", 0], ["user", 2000]]
    bad = talk([1], ["x"], prompt_roles="system")
    bad["turns"][0]["versions"], bad["turns"][1]["roles"], bad["turns"][1]["after"] = [["0", 1]], [[1, "tool"]], "0"
    shown, other = choose_samples([row, bad], 10)["steps"][0]["groups"][0]["rows"]
    assert shown["pm"] == [["system", 3], ["user", 2]] and shown["turns"][0]["w"] == [[0, 7]]
    assert [turn.get("after") for turn in shown["turns"]] == [None, None, -1, None]
    said = [[["tool", 6500], ["user", 500]], [["tool", 1000], ["user", 0]]]
    assert [turn.get("m") for turn in shown["turns"]][1::2] == said
    assert not {"pm"} & other.keys() and all(not {"m", "w", "after"} & turn.keys() for turn in other["turns"])


@needs_browser
def test_a_browser_draws_a_conversation_as_a_tree(tmp_path: Path) -> None:
    prompt = {"prompt": "Be short.\n1+1?", "prompt_roles": [["system", 0], ["user", 10]]}
    row = talk([2, 1, 1], ["first", "second", "third"], **prompt)
    row["turns"][3] |= {"after": 0, "roles": [["tool", 0]]}  # a branch behind the first turn
    row["turns"][0] |= {"versions": [[0, 3], [1, 4]], "reward": 0.5}
    text = section(drawn(traced(tmp_path, row), tmp_path), "traces")
    roles = {"system": 1, "user": 1, "tool": 1, "environment": 2, "policy": 3}
    assert {role: text.count(f'class="node {role}"') for role in roles} == roles
    assert text.count("Branch 1 of 2") == text.count("Branch 2 of 2") == 1 and 'forks <b class="">1</b>' in text
    assert 'weight version <b class="">3, 4</b>' in text and 'reward <b class="good">+0.5</b>' in text
    first, second = text.split("Branch 2 of 2")
    assert "first" in first and "second" not in first and "second" in second and "third" in second
    assert "turn 3" not in text and first.count(">turn 2<") == 1 and second.count(">turn 2<") == 1


@needs_browser
def test_traces_are_text_whoever_wrote_them(tmp_path: Path) -> None:
    failed = {"error": ATTACK, "finish_reason": "error", "reward": None}
    row = talk([1], [ATTACK], prompt=ATTACK, prompt_roles=[[ATTACK, 0]], **failed)
    row["turns"][1] |= {"roles": [[ATTACK, 0]], "rendered": ATTACK}
    row["turns"][0] |= {"text": ATTACK, "tokens": [ATTACK]}
    page = traced(tmp_path, row, talk([1], ["x"], prompt="plain", prompt_roles=[["constructor", 0]]))
    text = drawn(page, tmp_path)
    assert "<img" not in text and 'onerror="' not in text and "alert(2)</script>" not in text
    traces = section(text, "traces")
    assert traces.count("&lt;img src=x") >= 4 and 'class="node environment"' in traces


@needs_browser
def test_a_run_of_plain_answers_has_no_traces(make_run, tmp_path: Path) -> None:
    page = write_report([make_run("fp8", steps=5)], tmp_path / "r.html")
    assert '<section id="traces" hidden' in drawn(page, tmp_path)
