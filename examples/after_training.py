"""After training: evaluate a run, certify it, export it, and use the model elsewhere.

    jetrl train quickstart
    python examples/after_training.py runs/quickstart exported

The export is an ordinary Hugging Face folder: transformers loads it below, and so do vLLM and SGLang
(`vllm serve exported`). Its log-probs there are theirs, not jetrl's bits; the program prints how far they differ.
"""

import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jetrl


def command(*words):
    """Run `jetrl ...` as in a terminal; a failure ends the program with its message."""
    print("$ jetrl", *words, flush=True)
    subprocess.run([sys.executable, "-m", "jetrl", *words], check=True)


def log_probs_elsewhere(folder, tokens):
    """The log-prob of each token but the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def main(run, folder, prompt="12+34="):
    command("eval", run)                       # accuracy on the held-out problems
    command("parity", run, "--device", "cpu")  # training, prefill and decoding: the same bits
    command("export", run, folder)             # add --fp8 for a block-FP8 folder

    policy = jetrl.load_model(folder, device="cpu")
    [answer] = policy.generate([prompt], max_tokens=24, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt_tokens = tokenizer(prompt).input_ids
    elsewhere = log_probs_elsewhere(folder, [*prompt_tokens, *answer.tokens])[len(prompt_tokens) - 1 :]
    gap = (elsewhere - torch.tensor(answer.logprobs)).abs().max().item()
    print(f"{prompt}{answer.text}")
    print(f"transformers on the same tokens: log-probs differ by at most {gap:.3f}")
    return gap


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["runs/quickstart", "exported"]))
