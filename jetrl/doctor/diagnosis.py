"""All that the doctor looks at, in order, and the verdict: whether this machine can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl import __version__
from jetrl.doctor import libraries, machine
from jetrl.doctor.finding import Finding

if TYPE_CHECKING:
    from jetrl.doctor.trial import Trial

GPU = "GPU"  # section; what is bad there does not keep the CPU from training
TRIAL = "Certificate of the quickstart's shape in FP8"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and where training works."""

    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on which the certificate is bit-equal."""
        return tuple(trial.device for trial in self.trials if trial.ok)

    @property
    def ok(self) -> bool:
        """Whether this machine can train on some device: with a certificate, and nothing bad outside of the GPU."""
        return bool(self.devices) and not any(f.level == "bad" and f.section not in (GPU, TRIAL) for f in self.findings)

    def to_do(self) -> tuple[str, ...]:
        """What must be installed, freed or set, each once, in order."""
        return tuple(dict.fromkeys(f.cure for f in self.findings if f.level == "bad" and f.cure))

    def to_json(self) -> dict[str, Any]:
        return {
            "jetrl": __version__, "ok": self.ok, "devices": list(self.devices), "to_do": list(self.to_do()),
            "auto": self.trials[0].device if self.trials else None,
            "findings": [asdict(finding) for finding in self.findings],
            "certificates": [t.certificate.to_json() for t in self.trials if t.certificate is not None],
        }


def examine(tell: Callable[[str], None]) -> Diagnosis:
    """Look at everything; `tell` is called before slow parts. A broken torch ends it early, with the reason."""
    tell("importing packages")
    found, needed = [machine.python(), machine.cpu(), machine.memory()], libraries.needed()
    if any(libraries.import_error(finding.what) for finding in needed if finding.level == "bad"):
        return Diagnosis((*found, *needed), ())
    import torch

    from jetrl.doctor import gpu
    from jetrl.doctor.trial import trials

    found += [machine.threads(torch.get_num_threads()), *needed, *gpu.examine(), *libraries.optional(), *_disk()]
    on = "GPU: kernels are compiled at their first use, which takes a minute" if torch.cuda.is_available() else "CPU"
    tell(f"a tiny certificate ({on})")
    tried = trials()
    return Diagnosis((*found, *map(_verdict, tried)), tuple(tried))


def _disk() -> list[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from jetrl.config import Config, sections
    from jetrl.kernels.support import caches

    output = machine.output_folder(Path(Config.model_fields["output_dir"].default))
    warm_starts = Path(sections()["sft"].model_fields["cache_dir"].default)
    return [output, *machine.kept({"warm starts": warm_starts, **caches(), "Hugging Face": Path(HF_HUB_CACHE)})]


def _verdict(trial: Trial) -> Finding:
    what = f'device = "{trial.asked}"'
    if trial.certificate is None:
        return Finding(TRIAL, what, f"stops on the {trial.device}: {trial.failure}", "bad")
    rows = sum(link.rows for link in trial.certificate.links)
    text = f"on the {trial.device}: {rows} rows of log-probs in {trial.seconds:.1f} s, "
    if trial.ok:
        return Finding(TRIAL, what, text + "rollout and training bit-equal")
    wrong = next(link for link in trial.certificate.links if not link.ok)
    cure = "report it, with this page (jetrl doctor --json) and the output of jetrl parity"
    return Finding(TRIAL, what, text + f"DIFFERENT in link {wrong.link}: {wrong.first_difference}", "bad", cure)
