"""Training from Python: your own rows, reward and callback, step by step. `python train_from_python.py [STEPS]`

A small model with random weights learns to answer sums with digits of the right result; some ten seconds on a CPU.
"""

import sys

import jetrl

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 30)]


def digits(completions, answer, **columns):
    """The share of the right result's digits that the completion has, from 0 to 1."""
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer, strict=True)]


class StopWhenGood(jetrl.Callback):
    def on_step(self, trainer, step, metrics):
        if metrics["reward/mean"] > 0.99:
            trainer.stop()

    def on_evaluation(self, trainer, step, metrics):
        print(f"held out, after step {step}: {metrics['eval/file/avg@1']:.3f}")


def main(steps=10, run_dir="runs/train-from-python"):
    with jetrl.Trainer(
        "quickstart", reward=digits, dataset=ROWS, callbacks=[StopWhenGood()], run_dir=run_dir, resume="auto",
        overrides={
            "train.steps": steps, "train.lr": 3e-3, "sft.steps": 0, "task.num_eval": 32, "eval.eval_interval": 5,
            "rollout.prompts_per_step": 8, "rollout.group_size": 4, "rollout.max_response_length": 12,
        },
        verbose=False,
    ) as trainer:
        for done in trainer:
            print(f"step {done.step}: reward {done.metrics['reward/mean']:.3f}")
            [answer] = trainer.policy.generate(["12+23="], max_tokens=12)
            print(f"  12+23= {answer.text}")
    print(trainer.result.run_dir, trainer.result.model)
    return trainer.result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
