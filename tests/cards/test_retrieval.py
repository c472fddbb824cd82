"""The search against questions that were written without looking at the cards: half of them were never used for tuning."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import in_process
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.cards import search
from playbook.cards.load import load_all
from playbook.cards.model import guidance
from playbook.cards.search import load_sections
from playbook.cards.terms import Facts, KnownQuestion, facts, likeness, load_asked, opening, phrases, stated, terms
from playbook.errors import PlaybookError
from playbook.paths import data_root

QUESTIONS = Path(__file__).parent / "questions.yaml"
THREADS = ("issues", "later_issues")
NEWEST = ("tenth_issues", "eleventh_issues", "blind_issues")
"""Batches that were written to measure a finished search."""
TOP = 10


@dataclass(frozen=True)
class Question:
    ask: str
    cards: frozenset[str]
    thread: str = ""

    @property
    def held_out(self) -> bool:
        """By a hash, so that nobody chooses."""
        return int(hashlib.sha256(self.ask.encode()).hexdigest(), 16) % 2 == 1


def questions(index: search.SearchIndex) -> list[Question]:
    """Questions from the documents whose claims a card holds, and those without an answer."""
    home = {c.id: card.id for card in index.cards.values() for c in card.claims}
    return [
        Question(q["ask"], frozenset(home[c] for c in q["claims"] if c in home))
        for q in rows(QUESTIONS)
        if not q["claims"] or set(q["claims"]) & set(home)
    ]


@cache
def advising() -> frozenset[str]:
    return frozenset(guidance(load_all()))


@cache
def rows(path: Path) -> list[dict[str, Any]]:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)


def untouched(*batches: str) -> list[Question]:
    """Questions from public issue threads that the search does not know; one that only the trainer's own page answers has no card."""
    files = [QUESTIONS.with_name(f"{batch}.yaml") for batch in batches]
    return [Question(q["ask"], frozenset(q["cards"]) & advising(), q["from"]) for path in files for q in rows(path)]


def threads() -> list[Question]:
    """All questions from public issue threads: those that the search knows, and those that measure it."""
    return [*(Question(q.text, q.cards & advising(), q.thread) for q in load_asked()), *untouched(*THREADS, *NEWEST)]


def rank(index: search.SearchIndex, question: Question) -> int | None:
    """The place of the first right card; 0 where it is not among the first; None for no answer at all."""
    hits = search.search(index, question.ask, limit=TOP).hits
    if not hits:
        return None
    return next((i for i, h in enumerate(hits, 1) if h.id in question.cards), 0)


def score(index: search.SearchIndex, asked: list[Question]) -> tuple[float, ...]:
    """Of questions with an answer, the share whose card is first, that whose card is among three; of those without one, the share that is left
    without; and of those with one, the share that got any."""
    covered, none = ([rank(index, q) for q in asked if bool(q.cards) == answerable] for answerable in (True, False))
    hits = [covered.count(1), sum(r in (1, 2, 3) for r in covered), len(covered) - covered.count(None)]
    found = hits[0] / len(covered), hits[1] / len(covered), none.count(None) / len(none), hits[2] / len(covered)
    print(found)
    return found


@pytest.fixture(scope="module")
def index() -> search.SearchIndex:
    return search.index(load_all())


def test_the_questions_are_many_and_split_in_halves(index: search.SearchIndex) -> None:
    for every, least in ((questions(index), 120), (threads(), 200)):
        assert len({q.ask for q in every}) == len(every) >= least
        assert sum(not q.cards for q in every) >= 0.15 * len(every)
        assert 0.4 < sum(q.held_out for q in every) / len(every) < 0.6
        assert {c for q in every for c in q.cards} <= set(index.cards)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", q.thread) for q in threads())
    # What the search knows does not measure it.
    assert all(q.held_out for q in untouched(*THREADS))
    assert not {q.thread for q in untouched(*NEWEST)} & {q.thread for q in [*load_asked(), *untouched(*THREADS)]}


# (recall@1, recall@3, abstention recall, one less false abstention): what the search has to reach on either half; tune on the tuned half only.
FLOORS = (0.85, 0.945, 0.8, 29 / 30)


@pytest.mark.parametrize("half", ["tuned", "held out"])
@pytest.mark.sample("tuned")
def test_questions_find_their_card(index: search.SearchIndex, half: str) -> None:
    found = score(index, [q for q in [*questions(index), *untouched(*THREADS)] if q.held_out == (half == "held out")])
    assert all(a >= b for a, b in zip(found, FLOORS, strict=True)), found


FIRST_LOOK = {
    "tenth_issues": (28 / 39, 34 / 39, 33 / 44, 38 / 39),
    "eleventh_issues": (50 / 69, 58 / 69, 31 / 47, 62 / 69),
    "blind_issues": (150 / 224, 185 / 224, 77 / 170, 198 / 224),
}
"""The same of the newest batches: what the first look gave, but for one question without a card, for three that a card answers since (they count as not answered then), for three blind ones that are answered since, and for models that have names since (one more is first, one fewer among three); it stays below the aims, and may not get worse."""


@pytest.mark.parametrize("batch", NEWEST)
@pytest.mark.sample("tenth_issues")
def test_the_newest_questions_find_their_card_as_at_the_first_look(index: search.SearchIndex, batch: str) -> None:
    found = score(index, untouched(batch))
    assert all(a >= b - 1e-9 for a, b in zip(found, FIRST_LOOK[batch], strict=True)), found


@pytest.mark.parametrize(
    "query",
    [
        "x" * 100_000,
        "a" * 2000,
        "((((a+)+)+)+$" * 100,
        "\x00\x01\x02 dispatcher \x1b[31m\u202e",
        "9" * 2000,
        "1,234," * 300,
        ("all-to-all " * 200)[:2000],
        "\ud800",
        "ﷺ" * 2000,
        "'; DROP TABLE cards; --",
        "{{7*7}} ${jndi:ldap://x} ../../etc/passwd",
        "\n" * 1999,
        "to_be",
    ],
    ids=range(13),
)
def test_hostile_questions_are_answered_or_refused(index: search.SearchIndex, query: str) -> None:
    try:
        found = search.search(index, query)
    except PlaybookError as e:
        refusal = str(e)
    else:
        refusal = found.none
        assert all(h.id in index.cards for h in found.hits)
    assert len(refusal) < 300


@settings(max_examples=60, database=None)
@given(query=st.text(max_size=400), hardware=st.none() | st.text(max_size=40), gpus=st.none() | st.integers(0, 10**6))
def test_any_text_is_answered_or_refused(query: str, hardware: str | None, gpus: int | None) -> None:
    with contextlib.suppress(PlaybookError):
        search.search(small(), query, stated(hardware, None, gpus))


def test_where_no_gpu_of_a_family_will_do_all_of_them_were_looked_at() -> None:
    hits = search.search(search.index(load_all()), "moe dispatcher on nvl72", stated("hopper", None, None)).hits
    (limits,) = [h.limits for h in hits if h.id == "moe-dispatcher-choice"]
    assert "V5: gpu: found h100 or h200 or h800 or h20 or gh200, expected GB200 or GB300" in limits


@cache
def small() -> search.SearchIndex:
    return search.index(dict(list(load_all().items())[:3]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom at 128k on h100 moe", Facts(("h100",), None, None, 131072)),
        ("131,072 tokens on 256 GPUs of GB200", Facts(("gb200",), 256, None, 131072)),
        ("DeepSeek-V3 on 4xH200", Facts(("h200",), 4, "deepseek_v3", None)),
        ("from 4k to 128k", Facts()),
        ("20 % MFU on H100s", Facts(("h100",))),
        ("Qwen3-0.6B is slow", Facts(model="qwen3_0_6b")),
        ("Qwen3.5-35B-A3B is slow", Facts(model="qwen3_5_35b_a3b")),
        ("does it change between H100 and GB200", Facts(("gb200", "h100"), None, None, None)),
        ("hopper", Facts(("h100", "h200", "h800", "h20", "gh200"))),
        ("40k tokens/s", Facts()),
    ],
)
def test_a_question_says_where_it_runs(text: str, expected: Facts) -> None:
    assert facts(text) == expected


def test_options_go_before_the_question() -> None:
    assert stated("b200", None, 8).over(facts("H100, 4 gpus, 32k")) == Facts(("b200",), 8, None, 32768)
    assert stated("cpu", None, None).over(facts("8 gpus")) == Facts(("cpu",), 0)
    assert stated("cpu", None, None) == Facts(("cpu",), 0)
    assert stated("h200x4", "qwen3_30b_a3b", None) == Facts(("h200",), 4, "qwen3_30b_a3b")
    assert stated(None, "Qwen/Qwen3-30B-A3B", None) == Facts(model="qwen3_30b_a3b")
    with pytest.raises(PlaybookError, match="did you mean 'deepseek_v3'"):
        stated(None, "deepseek_v4", None)


def test_the_same_thing_in_other_words_is_the_same_term() -> None:
    for one, other in (("128K", "131072"), ("a2a", "all-to-all"), ("OOM", "out of memory"), ("ViT", "vision tower"), ("ZeRO-3", "FSDP2")):
        assert set(terms(one)) & set(terms(other)), (one, other)
    assert "launch" in terms("cudaLaunchKernel")
    assert "moe_token_dispatcher_type" in terms("moe_token_dispatcher_type=flex")


def test_degrees_are_read_as_people_write_them() -> None:
    for written in ("EP4", "ep=4", "EP 4"):
        assert {"ep", "4", "=expert_parallel"} <= set(terms(written)), written


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        ("convert the DeepSeek-V3 checkpoint", ["convert the deepseek v3 checkpoint"]),
        ("we convert slowly, and after six or seven other words comes the checkpoint", []),
    ],
)
def test_a_phrase_with_a_gap_allows_a_few_words(ask: str, found: list[str]) -> None:
    assert [words for words, name in phrases(ask) if name == "=weight_conversion"] == found


LOG = """
Traceback (most recent call last):
  File "/opt/app/train.py", line 412, in <module>
    main(sys.argv[1:])
[rank3]: INFO iteration 120/ 5000 | consumed samples: 30720 | elapsed time per iteration (ms): 4123.4 | lm loss: 6.2131
python 3.11.9, torch 2.5.1+cu124, driver 550.90
"""


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("MoE is slow on 104% of days" + LOG, "MoE is slow on 104% of days"),
        (LOG + "why is the step so slow", "why is the step so slow"),
        ("the step is slow\non eight of them\n\nanother paragraph of it", "the step is slow on eight of them"),
        ("EP=4 | 25% MFU\n[0] a=1", "EP=4 | 25% MFU"),
        ("Traceback (most recent call last):\n  a=b(c)\nRuntimeError: 1/2", "RuntimeError: 1/2"),
        ("oom", "oom"),
        (" \n ", ""),
    ],
)
def test_the_opening_of_a_pasted_text_is_its_question(text: str, asked: str) -> None:
    assert opening(text) == asked


def test_logs_do_not_drown_the_question_above_them(index: search.SearchIndex) -> None:
    """Long threads get the answers that their first sentence gets, but for one in ten at most."""
    covered = [q for q in threads() if q.cards][:200:4]
    alone, pasted = ([rank(index, Question(q.ask + tail, q.cards)) for q in covered] for tail in ("", LOG))
    assert sum(a == b for a, b in zip(alone, pasted, strict=True)) >= 0.9 * len(covered)


@pytest.mark.parametrize(
    ("ask", "card"),
    [
        ("LoRA fine-tuning of Qwen3-30B-A3B is slow", "moe-in-transformers"),
        ("peft adapters on experts are slow, are target_parameters the reason", "moe-in-transformers"),
        ("LoRA SFT with TRL pads half of the tokens, should I pack", "packed-fine-tuning"),
        ("GRPO with TRL is slow, is generation the wall", "rl-step"),
        ("best learning rate for LoRA", None),
        ("merge a LoRA adapter into the weights", None),
        ("KeyError when a QLoRA of a MoE is loaded, which layout", None),
        ("DPO loss is nan with LoRA", None),
    ],
)
def test_adapters_are_a_way_to_train_and_no_reason_to_refuse(index: search.SearchIndex, ask: str, card: str | None) -> None:
    found = search.search(index, ask)
    assert ([h.id for h in found.hits] or [None])[0] == card
    assert "lora" not in found.none


def test_a_question_like_one_without_a_card_takes_more_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = "training slow since tuesday, fans are loud"

    def found(known: frozenset[str]) -> list[str]:
        others = [q for q in load_asked() if "slow" not in q.text]
        monkeypatch.setattr(search, "load_asked", lambda: (KnownQuestion(ask, known, "owner/repository#1"), *others))
        return [h.id for h in search.search(search.index(load_all()), ask).hits]

    assert found(frozenset({"investigating-regressions"}))
    assert found(frozenset()) == []


def test_a_card_comes_nearer_for_a_question_like_those_that_it_answers(index: search.SearchIndex) -> None:
    """What another card answers in other words moves it no nearer, and a word that no known question has says nothing."""
    known = [KnownQuestion(f"the step is slow on tuesdays, {i}", frozenset({"investigating-regressions"}), "o/r#1") for i in range(40)]
    others = [KnownQuestion(f"memory is short in room {i}", frozenset({"recompute", "offloading"}), "o/r#2") for i in range(40)]
    alike = likeness([*known, *others, KnownQuestion("tuesdays", frozenset(), "o/r#3")], list(index.cards))
    found = alike.of(terms("slow on tuesdays with qwertz"))
    assert found["investigating-regressions"] > 0 > found["recompute"] == found["offloading"]
    assert found == alike.of(terms("slow on tuesdays"))
    assert found["pipeline-scaling"] == 0
    first, second = (search.rank(replace(index, alike=a), terms("slow on tuesdays"))[0] for a in (likeness([], list(index.cards)), alike))
    assert (first.card != second.card, second.card) == (True, "investigating-regressions")


def test_whether_there_is_an_answer_does_not_hang_on_how_many_are_asked_for(index: search.SearchIndex) -> None:
    for question in threads()[:60]:
        one, many = (search.search(index, question.ask, limit=n).hits for n in (1, TOP))
        assert [h.id for h in one] == [h.id for h in many][:1], question


def test_a_hit_says_where_it_does_not_apply(index: search.SearchIndex) -> None:
    hits = search.search(index, "flex dispatcher with DeepEP or HybridEP", stated("gb200", None, None)).hits
    first = hits[0]
    assert {"W10", "V5"} <= set(first.claims)
    assert first.applies
    assert any(limit.startswith("W10: gpu: found gb200") for limit in first.limits)
    assert not any(limit.startswith("V5") for limit in first.limits)


def test_what_is_about_our_own_trainer_answers_nobody(index: search.SearchIndex) -> None:
    """Its card's own words find it nowhere."""
    own = load_all()["torch-trainer-speed"]
    assert own.own_trainer
    for words in (own.title, *own.symptoms, *own.aliases):
        found = search.search(index, words, limit=TOP)
        assert own.id not in {*(h.id for h in found.hits), *found.nearest}


@pytest.mark.parametrize("ask", ["oom at 128k on h100", "OOM at 128K context on 8 H100"])
def test_out_of_memory_at_length_leads_to_the_three_ways_out(index: search.SearchIndex, ask: str) -> None:
    """The example of the README: split the sequence, recompute, offload; not the commit that brought it, nor every card that names the GPU."""
    assert {h.id for h in search.search(index, ask).hits[:3]} == {"long-context-cp-sizing", "recompute", "offloading"}


def test_nothing_that_applies_is_an_empty_answer(index: search.SearchIndex) -> None:
    """Claims that speak of one GPU only, asked for another one."""
    card = index.cards["moe-dispatcher-choice"]
    alone = card.model_copy(update={"claims": [c for c in card.claims if c.id == "V5"]})
    one = search.index({card.id: alone})
    assert search.search(one, "HybridEP dispatcher", stated("gb200", None, None)).hits
    none = search.search(one, "HybridEP dispatcher", stated("h100", None, None))
    assert none.hits == []
    assert "moe-dispatcher-choice would answer, and does not apply to the stated run (V5: gpu: found h100" in none.none
    assert search.search(one, "HybridEP dispatcher").hits[0].applies


@pytest.mark.parametrize(
    ("ask", "run", "card"),
    [
        ("fp8 recipe for the experts", stated("a100", None, None), "fp8-recipes"),
        ("fp8 recipe for the experts on A100", None, "fp8-recipes"),
        ("all-to-all token dispatcher", stated(None, "llama3_70b", None), "moe-dispatcher-choice"),
        ("all-to-all token dispatcher for a dense model", None, "moe-dispatcher-choice"),
    ],
)
def test_a_whole_card_may_not_apply(index: search.SearchIndex, ask: str, run: Facts | None, card: str) -> None:
    """Although single claims of it set no condition on the machine or model."""
    found = search.search(index, ask, run, limit=50)
    assert card not in [h.id for h in found.hits if h.applies]
    assert all(h.limits[0].startswith("the card: ") for h in found.hits if h.id == card)
    assert search.search(index, ask.split(" on ")[0].split(" for a ")[0]).hits[0].id == card


@pytest.mark.parametrize(
    "subject", ["learning rate for LoRA", "Muon with tensor parallelism", "find the straggler node", "reshard a TP4 checkpoint"]
)
def test_a_subject_that_no_card_names_leads_to_the_nearest(index: search.SearchIndex, subject: str) -> None:
    found = search.search(index, subject)
    assert found.hits == []
    assert found.none.startswith("no card covers '")
    assert set(found.nearest) <= set(index.cards)


def test_no_card_names_a_subject_of_the_table_by_the_way(index: search.SearchIndex) -> None:
    """Else the search would take every question about it for covered."""
    _, beyond = (data_root("tables") / "synonyms.yaml").read_text(encoding="utf-8").split("# Subjects that no card covers")
    subjects = re.findall(r"^([a-z_]+):", beyond, re.MULTILINE)
    assert len(subjects) > 20
    assert [s for s in subjects if f"={s}" in index.named] == []


def test_a_card_that_names_a_subject_covers_it(index: search.SearchIndex) -> None:
    card = index.cards["recompute"]
    more = search.index({**index.cards, card.id: card.model_copy(update={"symptoms": [*card.symptoms, "LoRA saves no activations"]})})
    assert search.search(more, "LoRA saves no activations").hits[0].id == card.id


@pytest.mark.parametrize("ask", ["显存不足怎么办", "обучение медленное на H100", "専門家並列 EP 8 が遅い"])
def test_a_question_in_another_script_is_told_so(index: search.SearchIndex, ask: str) -> None:
    found = search.search(index, ask)
    assert found.hits == []
    assert "another script" in found.none


def test_accents_are_no_other_script(index: search.SearchIndex) -> None:
    assert search.search(index, "récompute ös äctivations").hits[0].id == "recompute"


def test_guides_and_skills_stand_beside_cards() -> None:
    whole = search.index(load_all(), load_sections())
    sources = {p.source for ask in ("pick a token dispatcher on H200", "submit the job to slurm") for p in search.search(whole, ask).pages}
    assert sources >= {"skills/pick-moe-dispatcher/SKILL.md", "docs/guide/cluster.md"}
    assert search.search(whole, "how to bake sourdough bread").pages == []


def test_a_filter_keeps_claims_and_cards_that_have_one(index: search.SearchIndex) -> None:
    hits = search.search(index, "token dispatcher all-to-all", only=frozenset({"W9.m"})).hits
    assert [(h.id, h.claims) for h in hits] == [("moe-dispatcher-choice", ["W9"])]


def test_the_command_prints_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_process.document(capsys, "search", "tokens cross nodes in the expert layers")
    assert all({"id", "title", "claims", "why", "applies"} <= set(h) for h in printed["hits"])


def test_the_command_says_where_the_nearest_claims_stand_and_how_to_learn_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines may quote claims that nothing has shown."""
    monkeypatch.chdir(tmp_path)
    (hit,) = in_process.document(capsys, "search", "cuda graphs", "--limit", "1")["hits"]
    assert list(hit["standing"]) == hit["claims"]
    assert hit["standing"]["V15.r"] == ["confirmed, arithmetic"]
    assert [] in hit["standing"].values()
    out = in_process.run(capsys, "search", "cuda graphs", "--limit", "1")[1]
    nearest = "; ".join(f"{i} {', '.join(hit['standing'][i]) or 'untested'}" for i in hit["claims"][:3])
    assert f"  claims {nearest}; and {len(hit['claims']) - 3} more\n" in out
    assert "playbook cards show cuda-graphs" in out


def test_the_command_says_what_is_nearest_where_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_process.run(capsys, "search", "Muon with tensor parallelism")
    assert (code, out.startswith("nearest, and perhaps of no use: "), err.startswith("no card covers 'muon'; ")) == (0, True, True)


def test_a_question_may_begin_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process.run(capsys, "search", "--tp-comm-overlap brings nothing")
    assert (code, out.startswith("communication-overlap")) == (0, True)


def test_the_command_refuses_what_is_too_long_and_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process.run(capsys, "search", "x y " * 5000)[:2] == (2, "")
    assert in_process.document(capsys, "search", "sourdough bread recipe")["hits"] == []
