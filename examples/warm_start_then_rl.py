"""Supervised fine-tuning on your own solutions, then RL on the same problems: what did each of the two bring?

    python examples/warm_start_then_rl.py

The solutions are wrong in one case in three, as data from a weaker model may be. The warm start learns their mistakes,
too; RL is rewarded for right answers only, and corrects them. About two minutes on a CPU.
"""

import random

import jetrl


def rows(seed=0, count=400, wrong=0.33):
    """Problems `348>`: write the digits backwards. `solution` is what the warm start imitates; some are wrong."""
    draw = random.Random(seed)
    numbers = draw.sample(range(100, 1000), count)
    for number in numbers:
        text = str(number)
        answer = text[::-1]
        yield {"prompt": f"{text}>", "answer": answer, "solution": text if draw.random() < wrong else answer}


def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def main(run_dir="runs/warm-start-then-rl", sft_steps=150, rl_steps=30):
    settings = {
        "sft.steps": sft_steps, "sft.warmup_steps": min(10, sft_steps), "train.steps": rl_steps, "train.lr": 2e-4,
        "train.warmup_steps": 0, "task.params": {"check_gold": False},  # solutions may be wrong
        "task.num_eval": 64, "eval.eval_interval": 0, "rollout.max_response_length": 5,
        "model.arch.hidden_size": 64, "model.arch.intermediate_size": 192, "model.arch.num_hidden_layers": 2,
        "model.arch.num_attention_heads": 2, "model.arch.num_key_value_heads": 1,
    }
    with jetrl.Trainer(
        "quickstart", reward=right, dataset=rows(), eval_dataset=list(rows(seed=1, count=64, wrong=0)),
        run_dir=run_dir, overrides=settings, verbose=False,
    ) as trainer:
        score = trainer.evaluate()["eval/file/avg@1"]
        print(f"after the warm start: {score:.3f}")
        for done in trainer:
            print(f"step {done.step}: reward {done.metrics['reward/mean']:.3f}")
        trained = trainer.evaluate()["eval/file/avg@1"]
        print(f"after RL: {trained:.3f}")
    return score, trained


if __name__ == "__main__":
    main()
