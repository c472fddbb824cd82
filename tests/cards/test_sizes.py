"""Rules that name a size against the planner: questions of 25 models on clusters and eight lengths. Speeds are the planner's of now.

A search takes seconds, so few are asked, each rule at one of them at least; with PLAYBOOK_PARITY=1 all, as `docs/experiments/do-cards-and-planner-agree.md` was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache

import pytest
from in_process import printed

from playbook.cards import scope
from playbook.cards.load import load_all
from playbook.cards.terms import Facts
from playbook.paths import repo_root
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import cluster
from playbook_app.mcp.planning import plan_answer
from playbook_app.site import indexes

WITHIN = 0.05
"""Share of the planner's fastest predicted speed that a rule's size may cost, where the rule says that the two agree."""
SIZE_KEYS = frozenset(f"parallel.{k}" for k in ("cp", "tp", "ep", "etp")) | {
    "train.micro_batch_size", "train.recompute", "train.recompute_modules"
}  # fmt: skip
"""Settings that are sizes; a rule that sets one says how it stands to the planner."""
PLACES = (
    "llama3_8b 8 h200", "llama3_8b 64 h100", "llama3_8b 64 gb200", "llama3_70b 64 h100", "llama3_70b 64 h200", "llama3_70b 128 gb200",
    "qwen3_30b_a3b 8 h200", "qwen3_30b_a3b 16 h100", "qwen3_30b_a3b 64 h100", "qwen3_30b_a3b 64 gb200", "qwen3_vl_30b_a3b 8 h200",
    "qwen3_vl_30b_a3b 64 h100", "mixtral_8x7b 64 h100", "gpt_oss_120b 64 h100", "gpt_oss_120b 64 h200", "gpt_oss_120b 64 b200",
    "qwen3_next_80b_a3b 64 h100", "qwen3_next_80b_a3b 32 h200", "qwen3_next_80b_a3b 64 gb200", "qwen3_235b_a22b 256 h100",
    "qwen3_235b_a22b 64 h200", "qwen3_235b_a22b 128 gb200", "deepseek_v3 512 h100", "deepseek_v3 256 h200", "deepseek_v3 256 gb200",
)  # fmt: skip
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
EVERY = [f"{place} {length}" for place in PLACES for length in LENGTHS]
FEW = {
    "llama3_8b 8 h200 2048", "llama3_70b 64 h200 32768", "qwen3_30b_a3b 8 h200 131072", "qwen3_vl_30b_a3b 8 h200 8192",
    "gpt_oss_120b 64 b200 2048",
}  # fmt: skip
RULES = [rule.sizes for card in load_all().values() for rule in card.decide if rule.sizes]
QUESTIONS = [q for q in EVERY if q in FEW or os.environ.get("PLAYBOOK_PARITY")]


def asked(question):
    """The run of a question, as scopes ask for it, and the planner's question."""
    model, gpus, hardware, length = question.split()
    (facts,) = Facts((hardware,), int(gpus), model, int(length)).each()
    return facts, Question(MODELS[model], model, cluster(hardware), int(gpus), int(length))


@cache
def speed(question, fixed=()):
    """The fastest predicted speed, with what is fixed; 0 where nothing fits."""
    backend = "torch" if "backend=torch" in fixed else "megatron"
    kept = tuple(word for word in fixed if word != "backend=torch")
    q = asked(question)[1]
    found = search(Question(q.shape, q.model, q.cluster, q.gpus, q.seq_len, backend=backend, fixed=kept), 1).choices
    return found[0].speed if found else 0.0


def apart(question, rules):
    """The rules that say that they agree with the planner here, and do not."""
    facts, _ = asked(question)
    bad = []
    for rule in rules:
        words = tuple(scope.words(rule, facts["seq_len"]))
        if not words or not scope.agrees(rule, facts) or ("recompute=" in words and not speed(question, words)):
            continue  # nothing recomputed is a rule for memory to spare
        free = speed(question, tuple(w for w in words if w == "backend=torch"))
        if speed(question, words) < (1 - WITHIN) * free:
            bad.append(words)
    return bad


def agreeing(question):
    """The rules that say that they agree with the planner here, by their place."""
    facts, _ = asked(question)
    return {i for i, rule in enumerate(RULES) if scope.words(rule, facts["seq_len"]) and scope.agrees(rule, facts)}


def test_every_rule_that_agrees_anywhere_is_asked_about_at_short_and_long():
    assert set().union(*map(agreeing, QUESTIONS)) == set().union(*map(agreeing, EVERY))
    assert {int(q.split()[-1]) for q in QUESTIONS} >= set(LENGTHS[::2])


@pytest.mark.timeout(7000)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.sample("llama3_8b 8 h200 2048", "qwen3_30b_a3b 8 h200 131072")
def test_a_rule_and_the_planner_agree_where_the_rule_says_so(question):
    assert apart(question, RULES) == []


def test_the_published_rule_on_tokens_would_be_found_out():
    rule = next(r.sizes for r in load_all()["long-context-cp-sizing"].decide if r.sizes and r.sizes.tokens_per_cp_rank)
    planted = rule.model_copy(update={"tokens_per_cp_rank": 4096})
    assert apart("llama3_8b 64 h100 131072", [planted])
    assert not apart("llama3_8b 64 h100 131072", [rule])


def test_every_rule_that_sets_a_size_says_how_it_stands_to_the_planner():
    silent = [(c.id, rule.set) for c in load_all().values() for rule in c.decide if SIZE_KEYS & set(rule.set) and rule.sizes is None]
    assert silent == []


@pytest.mark.full
def test_the_question_of_128k_has_one_answer(capsys):
    question = "how many context-parallel ranks for qwen3_30b_a3b at 128k on 64 h100"
    shown = printed(capsys, "cards", "show", "long-context-cp-sizing")
    planned = printed(capsys, "plan", "qwen3_30b_a3b", "--gpus", "64", "--hardware", "h100", "--seq", "128k", "--top", "1")
    assert "cp=8 by the card, within 5 % of the planner" in printed(capsys, "search", question)
    assert "seq_len / 16384" in shown
    assert "size: within 5 % of the planner's fastest layout" in shown
    assert " cp=8 " in planned
    over_mcp = plan_answer(
        "qwen3_30b_a3b",
        64,
        "h100",
        seq_len=131072,
        global_batch_size=0,
        goal="tokens/s",
        backend="megatron",
        allow=frozenset(),
        fix=(),
        top=1,
    )
    assert "cp=8" in over_mcp.plans[0]["settings"]
    assert "4096 tokens per context-parallel rank" not in shown


_PAGE = """
globalThis.window = {location: {search: ""}, history: {replaceState() {}}};
const form = {querySelector: () => ({value: ""}), addEventListener() {}}, answer = {replaceChildren() {}};
globalThis.document = {
  querySelector: () => form, getElementById: () => answer, currentScript: {src: "http://site/javascripts/ask.js"},
  createElement: () => ({append() {}, children: [1]}),
};
globalThis.fetch = async () => ({json: async () => JSON.parse(require("fs").readFileSync(process.argv[3], "utf8"))});
require(process.argv[2]);
Promise.all(process.argv.slice(4).map((q) => form.playbookAsk(q))).then((all) => console.log(JSON.stringify(all.map((a) => [a.size, a.commands]))));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_question_box_gives_the_same_answer(tmp_path):
    (tmp_path / "cards.json").write_text(indexes.question_box(load_all()))
    (tmp_path / "page.js").write_text(_PAGE)
    queries = [
        "context parallel size for qwen3_30b_a3b at 128k on h100",
        "context parallel size for llama3_70b at 16k on h100",
        "context parallel size",
    ]
    words = ["node", tmp_path / "page.js", repo_root() / "docs/javascripts/ask.js", tmp_path / "cards.json", *queries]
    near, far, none = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout)
    assert near == [
        "CP 8 by the card, within 5 % of the planner's fastest layout",
        ["playbook plan qwen3_30b_a3b --gpus N --hardware h100 --seq 131072"],
    ]
    assert far == ["", ["playbook plan llama3_70b --gpus N --hardware h100 --seq 16384"]]
    assert none[0] == ""


def test_a_rule_that_asks_for_more_gpus_than_there_are_gives_way_to_the_planner(capsys):
    found = printed(capsys, "search", "context parallel size for llama3_8b at 128k on h100", "--gpus", "4")
    assert "size: playbook plan llama3_8b --gpus 4 --hardware h100 --seq 131072: " in found


def test_outside_its_range_the_planner_is_followed_and_the_answer_says_why(capsys):
    found = printed(capsys, "search", "context parallel size for llama3_70b at 16k on 64 h100")
    assert "--seq 16384: the card's rule is not known to come within 5 %" in found
