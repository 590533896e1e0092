"""What 8-bit weights do to drafts and answers: the SmolLM2 pair with `weights="fp8-draft"` and
`weights="fp8"` beside the model's own.

    python recipes/measure_fp8.py --prompts DATA

Of both: tokens per pass. Of "fp8-draft": answers must be the model's, token for token, or the
recipe fails. Of "fp8", over the model's own greedy answers: how often the same token is likeliest,
the mean KL divergence, the ratio of perplexities, and all three with the weights alone rounded;
how many of its answers are those of mode "ar" with such weights. Rows go to
bench/results/fp8_quality.json. Five to ten minutes on two cores.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

import dscale
from bench.result_files import ResultFile
from bench.rows import RESULTS, environment
from dscale.kernels.reference_scaled import quantize_rows
from dscale.text import read_prompts

OWN = Path(__file__).parents[1] / "bench" / "data" / "identity.jsonl"
FILES = {"gsm8k": "gsm8k_test", "math500": "math500", "humaneval": "humaneval", "mbpp": "mbpp"}
KEYS = ("set", "weights")
STATISTICS = ("equal_argmax", "mean_kl", "perplexity_ratio")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    model, tokenizer = dscale.demo.load(dtype=torch.float32, device="cpu")
    base = environment(args.commit, torch.float32) | {"model": "SmolLM2-135M-Instruct"}
    file, wrong = ResultFile(args.out / "fp8_quality.json", KEYS, base), []
    stop = tokenizer.eos_token_id
    for name in tqdm(args.sets, desc="sets"):
        prompts = [encode(tokenizer, text) for text in texts(name, args)]
        asked = (model, prompts, args.new_tokens, stop)
        answers, per_pass = answer(*asked, mode="dflash")
        about = {"set": name, "prompts": len(prompts), "new_tokens": args.new_tokens}
        about["tokens_per_pass_model"] = per_pass
        for weights in ("fp8-draft", "fp8"):
            got, per_pass = answer(*asked, mode="dflash", weights=weights)
            row = about | {"weights": weights, "tokens_per_pass": per_pass}
            row["same_as_model"] = share(got, answers)
            if weights == "fp8":
                row["same_as_ar"] = share(got, answer(*asked, mode="ar", weights=weights)[0])
                row |= compared(model, prompts, answers, activations=True)
                alone = compared(model, prompts, answers, activations=False)
                row |= {f"weights_only_{key}": alone[key] for key in STATISTICS}
            elif got != answers:
                wrong.append(name)
            tqdm.write(str(file.put(row)))
    if wrong:
        raise SystemExit(f"fp8-draft: expected the model's answers, got others in {wrong}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="folder of the sets; default: identity.jsonl")
    parser.add_argument("--sets", nargs="+", choices=list(FILES), default=list(FILES))
    parser.add_argument("--per-set", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def texts(name: str, args: argparse.Namespace) -> list[str]:
    """The first prompts of a set."""
    if args.prompts is None:
        rows = [row for row in read_prompts(OWN) if row["set"] == name]
    else:
        rows = read_prompts(args.prompts / f"{FILES[name]}.jsonl")
    return [row["prompt"] for row in rows[: args.per_set]]


def encode(tokenizer: Any, text: str) -> list[int]:
    """A prompt's ids as a user turn."""
    turn = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return list(ids)


def answer(
    model: Any, prompts: list[list[int]], new_tokens: int, stop: int, **settings: Any
) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts at once, each up to its stop id, and tokens per pass."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[stop] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    drafter = None if settings["mode"] == "ar" else dscale.demo.drafter()
    with dscale.attach(model, drafter, **settings) as spec:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        per_pass = round(spec.stats.tokens_per_pass, 4)
    found = out[:, longest:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in found], per_pass


def share(some: list[list[int]], others: list[list[int]]) -> float:
    """How many of the answers are equal, token for token."""
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


@torch.no_grad()
def compared(
    model: Any, prompts: list[list[int]], answers: list[list[int]], activations: bool
) -> dict[str, float]:
    """Statistics of the next token over the answers, rounded against the model."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    theirs = [scores(model, p, a) for p, a in zip(prompts, answers, strict=True)]
    with Rounded(model, activations):
        ours = [scores(model, p, a) for p, a in zip(prompts, answers, strict=True)]
    for want, got, tokens in zip(theirs, ours, answers, strict=True):
        index = torch.tensor(tokens)[:, None]
        equal = (want.argmax(1) == got.argmax(1)).sum()
        kl = (want.exp() * (want - got)).sum()
        worse = (want.gather(1, index) - got.gather(1, index)).sum()
        sums += torch.stack([equal.double(), kl, worse])
        count += len(tokens)
    equal, kl, worse = (sums / count).tolist()
    return {
        "tokens": count,
        "equal_argmax": round(equal, 5),
        "mean_kl": round(kl, 6),
        "perplexity_ratio": round(torch.tensor(worse).exp().item(), 5),
    }


def scores(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities float64 `[tokens, V]` of every next token of an answer."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)


class Rounded:
    """A model whose layer projections are rounded to 8 bits while it is entered; with
    `activations` what they multiply, too."""

    def __init__(self, model: Any, activations: bool) -> None:
        self.linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
        self.activations, self.hooks = activations, []

    def __enter__(self) -> None:
        self.weights = [linear.weight.data for linear in self.linears]
        for linear in self.linears:
            linear.weight.data = rounded(linear.weight.data)
            if self.activations:
                self.hooks.append(linear.register_forward_pre_hook(round_input))

    def __exit__(self, *exc_info: object) -> None:
        for linear, weight in zip(self.linears, self.weights, strict=True):
            linear.weight.data = weight
        for hook in self.hooks:
            hook.remove()


def rounded(x: Tensor) -> Tensor:
    """Rows `[..., K]` to 8 bits and back."""
    values, scale = quantize_rows(x.flatten(0, -2))
    return (values.float() * scale[:, None]).view_as(x)


def round_input(module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    """Hook of a projection: rounds the rows it multiplies, each by itself."""
    return rounded(arguments[0])


if __name__ == "__main__":
    main()
