"""The text a drafter is trained on: loops, splits, job order, excluded words, files, the card."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import drafter_data as data
import drafter_generate as generation
from drafter_data import Corpus, Prompt
from drafter_model import shape_for
from drafter_report import model_card

VOCAB = 61


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (list(range(40)), None),
        (list(range(10)) + [1, 2, 3, 4] * 12, 18),
        (list(range(8)) * 4, None),
        (list(range(8)) * 5, 8),
        ([5] * 11, None),
        ([5] * 12, 8),
    ],
)
def test_loop_start(tokens: list[int], start: int | None) -> None:
    assert data.loop_start(np.asarray(tokens)) == start


def test_loop_rule_keeps_the_text_before_the_loop() -> None:
    looping = np.asarray(list(range(30)) + [1, 2] * 20)
    kept = data.keep_response(looping, loops="cut")
    assert kept is not None
    assert kept[1]
    assert kept[0].tolist() == looping[:38].tolist()
    assert data.keep_response(looping, loops="drop") is None
    assert data.keep_response(np.asarray([4, 2]), loops="cut") is None


def test_corpus_files_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpus = Corpus(prompt_of=[1, 0, 1], temperature=[0.0, 0.3, 0.6], looped=[False, True, False])
    corpus.responses = [rng.integers(0, VOCAB, n) for n in (3, 1, 20)]
    for index, text in enumerate(("a", "b")):
        corpus.prompts.append(
            Prompt(id=text, source="s", split="train", text=text, tokens=np.arange(5 + index))
        )
    corpus.done_batches = 3
    files = data.save_corpus(corpus, tmp_path, vocab_size=VOCAB)
    assert len(files) <= 5
    back = data.load_corpus(tmp_path)
    assert back.done_batches == 3
    assert (back.prompt_of, back.temperature) == (corpus.prompt_of, corpus.temperature)
    assert all(map(np.array_equal, back.responses, corpus.responses))
    assert all(
        map(np.array_equal, (p.tokens for p in back.prompts), (p.tokens for p in corpus.prompts))
    )


def test_held_out_tasks_are_on_one_side() -> None:
    prompts = [
        Prompt(id=f"{source}/{n}", source=source, split="train", text="", tokens=np.asarray([1]))
        for n in range(6)
        for source in ("mbpp_train", "mbpp_train_stub")
    ]
    data.hold_out(prompts, {"mbpp_train": 2, "mbpp_train_stub": 1})
    held = {p.id for p in prompts if p.split == "val"}
    assert held == {f"{s}/{n}" for s in ("mbpp_train", "mbpp_train_stub") for n in (0, 1)}


@pytest.mark.parametrize(
    ("counts", "quota"),
    [
        ({"mine": 30, "other": 2}, {"mine": 3, "other": 1}),
        ({"mine": 9000}, {"mine": 64}),
        ({"mine": 30, "gsm8k_train": 9}, {"gsm8k_train": 64, "mbpp_train": 32}),
        ({}, {"gsm8k_train": 64, "mbpp_train": 32}),
    ],
)
def test_a_part_of_prompts_of_unknown_sources_is_held_out(
    counts: dict[str, int], quota: dict[str, int]
) -> None:
    prompts = prompts_of(counts)
    assert data.quota(prompts, {"gsm8k_train": 64, "mbpp_train": 32}) == quota
    data.hold_out(prompts, quota)
    for source in counts.keys() - {"gsm8k_train"}:
        assert {"train"} <= {p.split for p in prompts if p.source == source}


def test_a_single_prompt_cannot_be_held_out_and_trained_on() -> None:
    with pytest.raises(ValueError, match=r"^prompts: expected two or more of a source"):
        data.quota(prompts_of({"mine": 1}), {"gsm8k_train": 64})


def prompts_of(counts: dict[str, int]) -> list[Prompt]:
    return [
        Prompt(id=str(n), source=source, split="train", text="", tokens=np.asarray([1]))
        for source, count in counts.items()
        for n in range(count)
    ]


def test_batches_cover_every_job_once_and_start_with_the_measured() -> None:
    sizes = np.random.default_rng(0).integers(3, 30, 50)
    prompts = [
        Prompt(
            id=str(i), source="gsm8k_train", split="eval" if i < 5 else "train", text="",
            tokens=np.zeros(n, np.int64),
        )
        for i, n in enumerate(sizes)
    ]  # fmt: skip
    jobs = data.plan_jobs(prompts, temperatures=[0.3], shares={"gsm8k_train": 2.5}, seed=1)
    cut = generation.batches_of(jobs, prompts, 8, seed=1)
    flat = [j for b in cut for j in b]
    assert sorted(map(repr, flat)) == sorted(map(repr, jobs))
    assert {j.prompt for j in cut[0]} >= set(range(5))
    assert len(cut[0]) == 8
    assert all(len({j.temperature for j in b}) == 1 for b in cut)
    assert cut == generation.batches_of(jobs, prompts, 8, seed=1)


def test_word_grams_ignore_the_wrappers() -> None:
    turn = "one two three"
    assert data.word_grams(data.CODE_PREFIX + turn + data.MATHS_SUFFIX) == set()
    long = " ".join(f"w{i}" for i in range(14))
    assert len(data.word_grams(long + data.MATHS_SUFFIX)) == 2
    assert data.word_grams(long.upper()) == data.word_grams(long)


def test_model_card_states_the_figures() -> None:
    shape = shape_for(
        LlamaConfig(num_hidden_layers=4), num_layers=2, taps=(0, 2), mask_token_id=7, block_size=5
    )
    held = {"tokens_per_pass": 2.1, "slot_1_accuracy": 0.6}
    rate = {
        "requests": 4, "looping": 1, "tokens_per_pass": 2.5, "tokens_per_pass_no_loops": 2.25,
    }  # fmt: skip
    report: dict[str, Any] = {
        "parameters": 12_300_000,
        "device": "a GPU",
        "measured": {"gsm8k_test": rate},
        "corpus": {
            "train_responses": 10, "train_tokens": 99, "greedy": 5, "cut_loops": 1,
            "by_source": {"self_maths": {"responses": 10, "tokens": 99}},
        },
        "options": {
            "model_name": "M", "max_new": 256, "temperatures": [0.3], "sequences": 8, "anchors": 4,
            "optimizer": "adamw", "lr": 0.001, "final_lr": 0.02, "gamma": 7.0, "kl": 0.5,
            "greedy_labels": True,
        },
        "train": {
            "steps": 100, "epochs": 2.0, "seconds": 5.0,
            "history": [{"step": 100, "loss": 3.25, "val": held}],
        },
    }  # fmt: skip
    card = model_card(report, shape)
    for text in (
        "| gsm8k_test | 4 | 1 | 2.50 | 2.25 |",
        "12.3M",
        "| 100 | 3.250 | 2.100 | 0.600 |",
    ):
        assert text in card
