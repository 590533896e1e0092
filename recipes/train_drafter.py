"""Train a DFlash drafter for a target: its own responses, features, training, figures, model card.

    python recipes/train_drafter.py --stages generate,train,evaluate --out runs/drafter \
        --prompts train_prompts.jsonl.gz --eval gsm8k_test.jsonl math500.jsonl

Every stage reads what the one before left in `--out`, so they can run in separate commands, and
training goes on from its checkpoint when it is started again. Also runs under `accelerate launch`.
"""

import argparse
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import drafter_data as data
import drafter_generate as generation
import drafter_prompts
import drafter_report as reporting
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from drafter_data import Corpus
from drafter_features import FeatureCache, build_cache, feature_scale
from drafter_model import TrainableDrafter, shape_for
from drafter_steps import TrainOptions
from drafter_training import Trainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dscale.demo

HELD_OUT = {"gsm8k_train": 64, "mbpp_train": 32, "mbpp_train_stub": 32}
WARM_UP = "What is the capital of France? Answer with one word."
HELD_OUT_SELF = {"self_maths": 64, "self_code": 64}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stages", default="generate,train,evaluate")
    add("--out", type=Path, required=True)
    add("--model", default="smollm2", help="'smollm2' (embedded), or a folder or Hub id")
    add("--model-name", default="SmolLM2-135M-Instruct", help="what the model card calls it")
    add("--prompts", type=Path, nargs="*", default=[],
        help=".jsonl(.gz): id, prompt; source, or the file's name")  # fmt: skip
    add("--eval", type=Path, nargs="*", default=[], help="measured sets, never trained on")
    add("--exclude", type=Path, nargs="*", default=[], help="more sets self-made prompts avoid")
    add("--eval-limit", type=int, default=128, help="first prompts of each measured set")
    add("--eval-batch", type=int, default=64)
    add("--generator", choices=["dscale", "transformers"], default="dscale")
    add("--gen-batch", type=int, default=1024 if torch.cuda.is_available() else 32)
    add("--gen-seconds", type=float, default=240.0)
    add("--self-prompts", type=int, default=0, help="user turns the target writes itself")
    add("--max-prompt", type=int, default=256, help="tokens, template included")
    add("--max-new", type=int, default=256)
    add("--temperatures", type=float, nargs="*", default=[0.3, 0.6])
    add("--shares", type=json.loads, default=data.SHARES, help="JSON: responses per prompt")
    add("--loops", choices=["cut", "drop"], default="cut")
    add("--limit-prompts", type=int, default=None, help="of each training file, for a trial")
    add("--layers", type=int, default=3)
    add("--taps", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    add("--mask-id", type=int, default=16)
    add("--block", type=int, default=16)
    add("--init", choices=["target", "random"], default="target")
    add("--start-from", type=Path, default=None, help="a drafter folder to go on from")
    add("--num-labels", type=int, default=32, help="target tokens kept of each distribution")
    add("--cache-gb", type=float, default=100.0, help="device memory for target features")
    add("--pass-tokens", type=int, default=65536 if torch.cuda.is_available() else 2048)
    for item in fields(TrainOptions):
        kind: Any = bool_of if isinstance(item.default, bool) else type(item.default)
        add("--" + item.name.replace("_", "-"), type=kind, default=item.default)
    return parser.parse_args(argv)


def bool_of(text: str) -> bool:
    """`0` or `1` as a bool."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"expected 0 or 1, got {text!r}")
    return text == "1"


def load_target(name: str, accelerator: Accelerator) -> tuple[Any, Any]:
    """The frozen target in bfloat16 on a GPU, float32 elsewhere, and its tokenizer."""
    device = accelerator.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with accelerator.main_process_first():
        if name == "smollm2":
            model, tokenizer = dscale.demo.load(dtype=dtype, device=device)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
            tokenizer = AutoTokenizer.from_pretrained(name)
    return model.eval().requires_grad_(False), tokenizer


def generate(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Make or continue the corpus in `args.out`."""
    began_before = (args.out / "corpus-0.npz").is_file()
    corpus = data.load_corpus(args.out) if began_before else Corpus()
    vocab_size = model.config.vocab_size

    def save() -> None:
        data.save_corpus(corpus, args.out, vocab_size=vocab_size)

    if not began_before:
        read = {"max_tokens": args.max_prompt, "limit": args.limit_prompts}
        corpus.prompts = data.load_prompts(tokenizer, args.prompts, split="train", **read)
        read = {"max_tokens": 2 * args.max_prompt, "limit": args.eval_limit}
        corpus.prompts += data.load_prompts(tokenizer, args.eval, split="eval", **read)
        data.hold_out(corpus.prompts, data.quota(corpus.prompts, HELD_OUT))
    longest, rows = 2 * args.max_prompt, args.gen_batch
    if args.generator == "dscale":
        warm = data.tokenize(tokenizer, [data.chat_prefix(tokenizer, WARM_UP)])[0]
        opened = generation.dscale_generator(
            model, rows=rows, longest=longest + args.max_new, warm=warm
        )
    else:
        opened = generation.transformers_generator(model, rows=rows, longest=longest)
    found: dict[str, Any] = {}
    with opened as ask:
        if args.self_prompts and not began_before:
            found["self_prompts"] = drafter_prompts.make_prompts(
                corpus,
                tokenizer,
                ask,
                count=args.self_prompts,
                rows=args.gen_batch,
                max_tokens=args.max_prompt,
                seconds=args.gen_seconds / 4,
                excluded=data.excluded_grams([*args.eval, *args.exclude]),
                stops=generation.stop_ids(model),
                seed=args.seed,
            )
            data.hold_out(corpus.prompts, HELD_OUT_SELF)
        jobs = data.plan_jobs(
            corpus.prompts, temperatures=args.temperatures, shares=args.shares, seed=args.seed
        )
        batches = generation.batches_of(jobs, corpus.prompts, args.gen_batch, args.seed)
        found |= generation.run_jobs(
            corpus,
            batches,
            ask,
            max_new=args.max_new,
            seconds=args.gen_seconds,
            loops=args.loops,
            save=save,
        )
    return found


def make_cache(
    args: argparse.Namespace,
    model: Any,
    corpus: Corpus,
    chosen: list[int],
    drafter: Any,
    name: str,
) -> FeatureCache:
    """Target features of some responses."""
    return build_cache(
        model,
        corpus,
        chosen,
        drafter.shape,
        num_labels=min(args.num_labels, model.config.vocab_size),
        max_bytes=args.cache_gb * 1e9,
        pass_tokens=args.pass_tokens,
        name=name,
    )


def train(
    args: argparse.Namespace, accelerator: Accelerator, model: Any, report: dict[str, Any]
) -> bool:
    """Train, or go on; saves the drafter whenever it stops. Returns whether training is over."""
    corpus = data.load_corpus(args.out)
    report["corpus"] = data.summary(corpus)
    shape = shape_for(
        model.config,
        num_layers=args.layers,
        taps=tuple(args.taps),
        mask_token_id=args.mask_id,
        block_size=args.block,
    )
    set_seed(args.seed)
    longest = max(
        len(corpus.prompts[p].tokens) + len(r)
        for p, r in zip(corpus.prompt_of, corpus.responses, strict=True)
    )
    drafter = TrainableDrafter(shape, longest=longest + args.pad_length)
    decoder = model.get_decoder()
    drafter.start_from(decoder.layers, decoder.norm.weight, copy=args.init == "target")
    if args.start_from is not None:
        saved = load_file(args.start_from / "model.safetensors")
        drafter.load_state_dict({name: t.float() for name, t in saved.items()}, strict=False)
    held = make_cache(args, model, corpus, corpus.select("val", greedy=True), drafter, "val")
    cache = make_cache(args, model, corpus, corpus.select("train"), drafter, "train")
    drafter.feature_scale.copy_(feature_scale(cache).cpu())
    if args.start_from is not None:
        with torch.no_grad():
            drafter.fc.weight /= drafter.feature_scale
    options = TrainOptions(**{f.name: getattr(args, f.name) for f in fields(TrainOptions)})
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    trainer = Trainer(accelerator, drafter, embedding, head, cache, held, options)
    trainer.resume(args.out)
    if options.compile:
        report["self_check"] = trainer.compile()
    done = trainer.run(args.out)
    if accelerator.is_main_process:
        reporting.save(drafter, args.out / "drafter")
        report["parameters"] = sum(p.numel() for p in drafter.parameters())
        report["train"] = {
            "steps": trainer.progress.step,
            "of_steps": trainer.progress.total,
            "seconds": round(trainer.progress.seconds, 1),
            "epochs": trainer.progress.step * trainer.batch_size / cache.num_sequences,
            "sequences": cache.num_sequences,
            "step_times_ms": trainer.times,
            "history": trainer.progress.history,
            "done": done,
        }
        report["replay"] = replays(args, model, corpus, drafter, trainer)
        reporting.write_report(report, args.out / "drafter", shape)
        print(json.dumps({"replay": report["replay"]}))
    return done


def replays(
    args: argparse.Namespace, model: Any, corpus: Corpus, drafter: Any, trainer: Trainer
) -> dict[str, Any]:
    """Replayed figures on held-out prompts and measured sets, by source, loops excluded."""
    out: dict[str, Any] = {}
    for split in ("val", "eval"):
        chosen = corpus.select(split, greedy=True)
        chosen = [i for i in chosen if len(corpus.responses[i]) > 1]
        if not chosen:
            continue
        held = make_cache(args, model, corpus, chosen, drafter, split)
        names = [corpus.prompts[corpus.prompt_of[i]].source for i in chosen]
        found = trainer.replay(held, names)
        out |= {f"{split}: {name}": row for name, row in found.items()}
    return out


def main(argv: list[str] | None = None) -> None:
    """Run the asked stages."""
    args = arguments(argv)
    stages = args.stages.split(",")
    if not set(stages) <= {"generate", "train", "evaluate"}:
        raise ValueError(f"stages: expected generate, train, evaluate, got {args.stages}")
    args.out.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        step_scheduler_with_optimizer=False,
    )
    model, tokenizer = load_target(args.model, accelerator)
    path = args.out / "report.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    device = accelerator.device
    report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    values = {k: v for k, v in vars(args).items() if not isinstance(v, float) or math.isfinite(v)}
    if "train" in stages or "options" not in report:
        report["options"] = json.loads(json.dumps(values, default=str))
    report["torch"] = torch.__version__
    if "generate" in stages and accelerator.is_main_process:
        report["generate"] = generate(args, model, tokenizer)
        print(json.dumps({"generate": report["generate"]}))
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    if "train" in stages and not train(args, accelerator, model, report):
        print("training stopped before its last step: run the same command again to go on")
    if "evaluate" in stages and accelerator.is_main_process:
        shape = shape_for(
            model.config,
            num_layers=args.layers,
            taps=tuple(args.taps),
            mask_token_id=args.mask_id,
            block_size=args.block,
        )
        report["measured"] = reporting.measure(
            model,
            tokenizer,
            args.out / "drafter",
            args.eval,
            limit=args.eval_limit,
            rows=args.eval_batch,
            max_new=args.max_new,
        )
        reporting.write_report(report, args.out / "drafter", shape)
        print(json.dumps({"measured": report["measured"]}))


if __name__ == "__main__":
    main()
