// The question box of the home page: the search of the cards as `playbook search` counts it, over the passages that the build wrote beside this site.
// Without this script the box opens the search of all pages.
(function () {
  "use strict";
  const form = document.querySelector("form.pb-ask");
  if (!form) return;
  const place = new URL("../search/cards.json", document.currentScript.src);
  const root = new URL("../", document.currentScript.src);
  const input = form.querySelector("input"), answer = document.getElementById("pb-asked");
  let loaded;
  // The least share of a question's information that a skill's description has.
  const SKILL = 0.4;

  const count = (words) => words.reduce((all, word) => all.set(word, (all.get(word) || 0) + 1), new Map());

  // BM25 as Lucene has it, over lists of numbers of terms.
  function bm25(documents, data) {
    const held = documents.map(count), lengths = documents.map((d) => d.length);
    const mean = lengths.reduce((a, b) => a + b, 0) / documents.length, frequency = new Map();
    held.forEach((h) => h.forEach((_, term) => frequency.set(term, (frequency.get(term) || 0) + 1)));
    return (words) => documents.map((_, i) => words.reduce((sum, term) => {
      const times = held[i].get(term);
      if (!times) return sum;
      const df = frequency.get(term), rare = Math.log(1 + (documents.length - df + 0.5) / (df + 0.5));
      return sum + rare * times / (times + data.k1 * (1 - data.b + data.b * lengths[i] / mean));
    }, 0));
  }

  // For each card, the log odds of terms between the known questions that it answers and all, as naive Bayes has them.
  function likeness(data) {
    const many = data.cards.map(() => 0), held = new Map();
    for (const [cards, terms] of data.asked) {
      cards.forEach((card) => { many[card] += 1 / cards.length; });
      for (const term of terms) {
        if (!held.has(term)) held.set(term, {times: 0, of: data.cards.map(() => 0)});
        const seen = held.get(term);
        seen.times += 1;
        cards.forEach((card) => { seen.of[card] += 1 / cards.length; });
      }
    }
    return (words) => [...new Set(words)].filter((t) => held.has(t)).map((t) => held.get(t)).reduce((sums, {times, of}) => {
      const share = (times + 1) / (data.asked.length + 2);
      return sums.map((sum, i) => sum + Math.log((of[i] / share + data.prior) / (many[i] + data.prior)));
    }, data.cards.map(() => 0));
  }

  function prepare(data) {
    const numbers = new Map(data.terms.map((term, i) => [term, i]));
    const of = (wanted) => data.cards.map((_, i) => data.passages.filter((p) => p[0] === i && wanted(p[1])).flatMap((p) => p[2]));
    const parts = {title: of((k) => k === "t" || k === "a"), signs: of((k) => k === "s" || k === "a"), body: of(() => true)};
    const frequency = new Map();
    data.passages.forEach((p) => new Set(p[2]).forEach((t) => frequency.set(t, (frequency.get(t) || 0) + 1)));
    const weights = new Map([...frequency].map(([t, n]) => [t, Math.log(1 + (data.passages.length - n + 0.5) / (n + 0.5))]));
    const longest = Object.keys(data.phrases).sort((a, b) => b.length - a.length).map((p) => p.replace(/[.]/g, "\\."));
    return {
      ...data, numbers, weights, most: Math.max(...weights.values()),
      fieldScores: Object.keys(data.fields).map((name) => [data.fields[name], bm25(parts[name], data)]),
      pieceScores: bm25(data.passages.map((p) => p[2]), data),
      odds: new Map(data.odds),
      likeness: likeness(data),
      skillScores: bm25(data.skills.map((s) => s.terms), data),
      vocabulary: parts.body.map((words) => new Set(words)),
      own: parts.title.map((words, i) => new Set([...words, ...parts.signs[i]])),
      named: new Set([...parts.title, ...parts.signs].flat()),
      kinds: Object.entries(data.kinds).map(([kind, known]) => [kind, new Set(known)]),
      stopWords: new Set(data.stop),
      phrase: new RegExp("(?<![^ ])(?:" + longest.join("|") + ")(?![^ ])", "g"),
      gap: new RegExp(data.gapped.replaceAll("(?P<", "(?<"), "g"),
    };
  }

  function normal(text) {
    const line = text.normalize("NFKD").replace(/\p{M}/gu, "").replace(/\p{C}/gu, " ").toLowerCase().replace(/(?<=\d)[,_](?=\d{3}(?!\d))/g, "");
    return line
      .replace(/\b(\d{1,4})\s?([km])\b(?!\s?(?:tokens?|tok)?\s?\/|\s?(?:tok|tokens?) per s)/g, (_, n, unit) => String(n * (unit === "k" ? 1024 : 1048576)))
      .replace(/\b(tp|pp|ep|cp|dp|sp|vpp|etp|edp|fsdp|mbs|gbs)=?(\d{1,5})\b/g, "$1 $2");
  }

  // A word that no card has gets the stem of the nearest form that one has.
  function stem(found, word) {
    if (word in found.stems) return found.stems[word];
    for (const form of [word + "s", word + "ed", word + "ing", word.replace(/(?:es|s|ed|d|ing|ly)$/, ""), word.replace(/(?:ed|ing)$/, "e")]) {
      if (form.length > 3 && form in found.stems) return found.stems[form];
    }
    return word.replace(/(?<=\w{4})s$/, "");
  }

  const words = (line) => line.match(/[a-z0-9]+(?:\.[0-9]+)?/g) || [];

  function phrases(found, spaced) {
    const exact = [...spaced.matchAll(found.phrase)].flatMap((m) => found.phrases[m[0]].map((name) => [m[0], name]));
    return exact.concat([...spaced.matchAll(found.gap)].map((m) => [m[0], found.gaps[Object.keys(m.groups).find((g) => m.groups[g] !== undefined)]]));
  }

  function terms(found, text) {
    const line = normal(text), plain = words(line);
    const parts = text.split(/\s+/).flatMap((w) => {
      const split = w.split(/(?<=[a-z0-9])(?=[A-Z][a-z])/);
      return split.length > 1 && w !== w.toLowerCase() ? split.map((s) => s.toLowerCase()) : [];
    });
    const stems = [...plain, ...parts].filter((w) => !found.stopWords.has(w)).map((w) => stem(found, w));
    return [...stems, ...phrases(found, plain.join(" ")).map((p) => p[1]), ...(line.match(/(?<![a-z0-9])[a-z0-9]+(?:_[a-z0-9]+)+/g) || [])];
  }

  function otherScript(text) {
    const letters = text.normalize("NFKD").match(/\p{L}/gu) || [];
    const other = letters.reduce((n, c) => n + (/\p{Script=Latin}/u.test(c) ? 0 : /\p{Lo}/u.test(c) ? 3 : 1), 0);
    return letters.length ? other / (other + letters.filter((c) => /\p{Script=Latin}/u.test(c)).length) : 0;
  }

  // What the question says about GPUs, model, length, links and MFU; nothing of lengths and counts where it names several.
  function facts(found, line) {
    const said = new Set(words(line)), single = (values) => new Set(values).size === 1 ? values[0] : undefined;
    const named = found.gpus.filter((g) => said.has(g) || said.has(g + "s")), counts = [...line.matchAll(/\b(\d{1,6})\s?(?:x\s?)?(?:gpus?|cards|accelerators|devices)\b/g)].map((m) => Number(m[1]));
    for (const m of line.matchAll(/\b(\d{1,6})\s?x\s?(?:nvidia\s)?([a-z]{1,2}\d{2,3})\b|\b([a-z]{1,2}\d{2,3})\s?x\s?(\d{1,6})\b/g)) {
      if (found.gpus.includes(m[2] || m[3])) { named.push(m[2] || m[3]); counts.push(Number(m[1] || m[4])); }
    }
    const family = Object.keys(found.families).filter((f) => said.has(f)).flatMap((f) => found.families[f]);
    const flat = words(line).join("").replaceAll(".", "");
    const model = Object.keys(found.models).filter((m) => flat.includes(m.replaceAll("_", ""))).sort((a, b) => b.length - a.length)[0];
    const dense = /\bdense (?:model|llm|transformer|\d{1,3}b)\b/.test(line) && !/\b(?:moe|experts?)\b/.test(line);
    const mfu = line.match(/\b(\d{1,2}(?:\.\d{1,2})?) ?%? ?mfu\b|\bmfu (?:of |is |at |only )?(\d{1,2}(?:\.\d{1,2})?)\b/);
    const link = line.match(/\b(\d{1,4})\s?gbe\b|\b(ib|roce|efa)-?\s?(\d{2,5})\b/);
    return {
      gpu: [...new Set([...named, ...family])], gpus: single(counts), model, ...(model ? found.models[model] : dense ? {moe: false} : {}),
      seq_len: single((line.match(/\b\d{4,7}\b/g) || []).map(Number).filter((n) => n % 1024 === 0)), mfu: mfu && (mfu[1] || mfu[2]),
      network: link ? (link[1] ? `${link[1]}GbE` : `${link[2].replace("ib", "IB").replace("roce", "RoCE").replace("efa", "EFA")}-${link[3]}`) : /\bno infiniband\b/.test(line) ? "none" : "",
      // A number before a GPU's name, which the search takes for no count.
      many: single(counts) || [...line.matchAll(/\b(\d{1,6}) (?:nvidia )?([a-z]{1,2}\d{2,3})s?\b/g)].filter((m) => found.gpus.includes(m[2])).map((m) => Number(m[1]))[0],
    };
  }

  // Whether one part of a scope holds: a flag, words such as `H100|H200`, a number such as `>=2` or `2..8`, or a list of them.
  function holds(predicate, fact) {
    if (Array.isArray(predicate)) return predicate.some((p) => holds(p, fact));
    if (typeof predicate === "boolean" || typeof fact === "boolean") return predicate === fact;
    if (typeof fact === "string") return String(predicate).split("|").some((p) => words(p.toLowerCase()).every((w) => words(fact).includes(w)));
    const range = String(predicate).split("..").map(Number), compared = String(predicate).match(/^\s*(>=|<=|==|>|<)?\s*(-?[0-9.]+)\s*$/);
    if (range.length === 2) return range[0] <= fact && fact <= range[1];
    const bound = Number(compared[2]);
    return {">=": fact >= bound, "<=": fact <= bound, ">": fact > bound, "<": fact < bound}[compared[1]] ?? fact === bound;
  }

  // A card speaks for a run where its own scope and that of a claim do, on any of the GPUs that were named.
  function applies(card, said) {
    const meets = (scope) => (said.gpu.length ? said.gpu : [undefined]).some((gpu) => Object.entries({...said, gpu}).every(([key, fact]) => fact === undefined || !(key in scope) || holds(scope[key], fact)));
    const [whole, ...claims] = card.scopes;
    return meets(whole) && claims.some(meets);
  }

  // The cards that answer, best first; or why none does, and the nearest.
  function search(found, query) {
    if (otherScript(query) > found.mostly) return {cards: [], none: "The cards are in English; ask in English, or with the error line."};
    const asked = terms(found, query);
    if (!asked.length) return {cards: [], none: "Say what you see or want, such as: out of memory at 128k."};
    const known = asked.map((t) => found.numbers.get(t)).filter((t) => t !== undefined);
    const scores = found.likeness(known).map((odds) => found.alike * odds), best = found.cards.map(() => 0);
    for (const [weight, score] of found.fieldScores) score(known).forEach((s, i) => { scores[i] += weight * s; });
    found.pieceScores(known).forEach((s, i) => { best[found.passages[i][0]] = Math.max(best[found.passages[i][0]], s); });
    const plain = words(normal(query)), ways = new Set(found.ways);
    const about = Object.fromEntries(found.kinds.map(([kind, known]) => [kind, Math.min(found.most_words, plain.filter((w) => known.has(w)).length)]));
    // The way of training speaks neither for a card nor against it in a question about speed or memory in several words, or in one and about experts.
    const aims = about.aim + (about.aim > 0 && asked.some((t) => found.experts.includes(t)) ? 1 : 0);
    const neutral = aims >= found.most_words && !about.fault ? ways : new Set();
    const against = [...new Set(asked)].filter((t) => !neutral.has(t)).reduce((sum, t) => sum + (found.odds.get(found.numbers.get(t)) ?? found.unseen), 0);
    const weigh = new Map(asked.filter((t) => t.startsWith("=") || !t.includes("_")).map((t) =>
      [t, found.weights.get(found.numbers.get(t)) ?? (/\d/.test(t) ? 0 : found.unknown * found.most)]));
    const all = [...weigh.values()].reduce((a, b) => a + b, 0) || 1;
    const share = (held) => [...weigh].reduce((n, [t, w]) => n + (held.has(found.numbers.get(t)) ? w : 0), 0) / all;
    const ranked = found.cards.map((card, i) => (
      {card, i, score: scores[i] + found.passage * best[i], evidence: share(found.vocabulary[i]) * Math.sqrt(best[i] / found.most)}
    )).filter((r) => best[r.i] > 0).sort((a, b) => b.score - a.score);
    const nearest = ranked.slice(0, found.nearest).map((r) => r.card);
    const unnamed = phrases(found, plain.join(" ")).filter((p) => !found.named.has(found.numbers.get(p[1])));
    const beyond = unnamed.filter((p) => !neutral.has(p[1])), subject = unnamed.find((p) => !ways.has(p[1]));
    const signs = ranked.length && {
      constant: 1, evidence: Math.max(...ranked.map((r) => r.evidence)), passage: Math.log1p(best[ranked[0].i]), own: share(found.own[ranked[0].i]),
      beyond: Math.min(found.most_words, beyond.length), odds: against, ...about,
    };
    const covered = signs && Object.entries(signs).reduce((sum, [name, value]) => sum + found.signs[name] * value, 0) >= found.least;
    const said = facts(found, normal(query)), kept = ranked.filter((r, i) => i === 0 || r.evidence >= found.beside);
    if (!covered || !kept.some((r) => applies(r.card, said))) {
      return {cards: [], none: subject ? `No card covers “${subject[0]}”.` : "No card covers this question.", nearest};
    }
    const fits = kept.filter((r) => applies(r.card, said)), rest = kept.filter((r) => !applies(r.card, said));
    return {cards: [...fits, ...rest].slice(0, 5).map((r) => r.card), said};
  }

  // The diagnosis that a question about speed asks for; empty where it names no speed, or neither model nor GPUs.
  function diagnosis(found, query) {
    const line = normal(query), said = facts(found, line);
    if (!/\b(?:mfu|slow|slower|too slow|throughput|utili[sz]ation|tokens per second|tokens\/s|step time)\b/.test(line)) return "";
    if (!said.model && !(said.gpu.length && said.many)) return "";
    return `playbook diagnose --model ${said.model || "MODEL"} --gpus ${said.many || "N"} --gpu ${kind(said)}${said.mfu ? ` --mfu ${said.mfu}` : ""}`;
  }

  const kind = (said) => said.gpu.length === 1 ? said.gpu[0] : "KIND";

  // Commands that a question asks for, each with what it is for: a plan, the memory of a layout, two commands against each other. Capital words are left to fill in.
  function commands(found, query) {
    const line = normal(query), said = facts(found, line), out = [];
    const run = `--gpus ${said.many || "N"}`, length = said.seq_len ? ` --seq ${said.seq_len}` : "", network = said.network ? ` --network ${said.network}` : "";
    const layout = line.match(/\b(?:tp|pp|cp|ep|vpp|mbs) \d+\b/g);
    if (layout && /\b(?:memory|oom|fits?|gib)\b/.test(line)) {
      out.push(["What this layout holds: ", `playbook layout memory --model ${said.model || "MODEL"} gpus=${said.many || "N"} ${layout.map((w) => w.replace(" ", "=")).join(" ")}${said.seq_len ? ` seq_len=${said.seq_len}` : ""}`, "guide/layouts.html"]);
    } else if ((said.model || said.many) && /\b(?:which|what|best|how (?:much|many|fast|should)|layout|parallel\w*|fsdp|cp|tp|pp|ep|fits?|oom|out of memory|plan|configuration|train)\b/.test(line)) {
      out.push(["The fastest layouts that fit: ", `playbook plan ${said.model || "MODEL"} ${run} --hardware ${kind(said)}${length}${network}`, "guide/plans.html"]);
    }
    if (/\b(?:faster than|slower than|versus|vs|compare|regress\w*|got slower|slower since|slower after)\b/.test(line)) {
      out.push(["Measure one against the other: ", "playbook ab -- COMMAND_A --vs COMMAND_B", "guide/your-trainer.html"]);
    }
    return out;
  }

  // Pages of decisions, with the form filled in.
  function doors(found, query) {
    const line = normal(query), said = facts(found, line);
    const filled = new URLSearchParams(Object.entries({model: said.model, gpus: said.many, hardware: said.gpu.length === 1 ? said.gpu[0] : undefined, seq_len: said.seq_len}).filter(([, v]) => v)).toString();
    return [["fsdp-or-3d", "FSDP or 3D?", /\b(?:fsdp\d?|3d|zero-?3)\b|\btp\b.*\bpp\b|\bwhich (?:layout|parallelism)\b/], ["how-much-cp", "How much CP?", /\b(?:cp|context parallel\w*|long context)\b/], ["which-dispatcher", "Which dispatcher?", /\b(?:dispatchers?|deepep|hybridep|all-?to-?all|alltoall)\b/]]
      .filter(([, , asked]) => asked.test(line)).map(([page, title]) => [title, `_generated/${page}.html${filled ? `?${filled}` : ""}`]);
  }

  // The skills whose descriptions hold most of the question's information; at most two.
  function skillsFor(found, query) {
    const asked = [...new Set(terms(found, query))].map((t) => found.numbers.get(t));
    const weight = (t) => found.weights.get(t) ?? (t === undefined ? found.unknown : 1) * found.most, all = asked.reduce((sum, t) => sum + weight(t), 0) || 1;
    const known = asked.filter((t) => t !== undefined), score = found.skillScores(known);
    return found.skills.map((skill, i) => [known.reduce((sum, t) => sum + (skill.terms.includes(t) ? weight(t) : 0), 0) / all, score[i], skill])
      .filter(([share]) => share >= SKILL).sort((a, b) => b[1] - a[1]).slice(0, 2).map(([, , skill]) => skill);
  }

  // Whether a rule's size agrees with the planner for a run: all of one range's model, experts and length.
  function agrees(range, said, length, moe) {
    const [low, high] = (String(range.seq_len || "0..Infinity").replace(/^<=/, "0..")).split("..").map(Number);
    return (range.model === undefined || range.model.split("|").includes(said.model)) && (range.moe === undefined || range.moe === moe) &&
      length >= low && length <= (high === undefined ? low : high);
  }

  // CP of a card's rule where it agrees with the planner, else the planner alone; empty where the question states no model and no single length.
  function sizes(found, query, cards) {
    const said = facts(found, normal(query)), length = said.seq_len;
    const rule = cards.slice(0, 1).flatMap((card) => card.sizes).find((s) => s.tokens_per_cp_rank);
    if (!rule || !said.model || !length) return "";
    const cp = 2 ** Math.max(0, Math.ceil(Math.log2(length / rule.tokens_per_cp_rank)));
    return rule.agrees.some((range) => agrees(range, said, length, said.moe)) ? `CP ${cp} by the card, within 5 % of the planner's fastest layout` : "";
  }

  function element(name, text, extra = {}) {
    return Object.assign(document.createElement(name), {textContent: text, ...extra});
  }

  function line(card) {
    const item = element("li", "");
    item.append(element("a", card.title, {href: new URL(`cards/${card.id}.html`, root).href}), element("span", card.summary, {className: "pb-of"}));
    return item;
  }

  function hint(words, command, page) {
    const line = element("p", words);
    line.append(element("code", command), " (", element("a", "what it answers", {href: new URL(page, root).href}), ")");
    return line;
  }

  function show(found, query) {
    const result = search(found, query), command = diagnosis(found, query), size = sizes(found, query, result.cards);
    const more = commands(found, query), pages = doors(found, query), skills = skillsFor(found, query);
    const parts = pages.map(([title, page]) => { const line = element("p", "Answered with its alternatives: "); line.append(element("a", title, {href: new URL(page, root).href})); return line; });
    if (command) parts.push(hint("How fast it should be, and what to try first: ", command, "guide/diagnose.html"));
    parts.push(...more.map((line) => hint(...line)));
    if (size) parts.push(element("p", size));
    const answered = pages.length || command || more.length || skills.length;
    if (result.none) parts.push(element("p", (answered ? "Beyond that: " : "") + result.none + (result.nearest && result.nearest.length ? " Nearest:" : "")));
    const list = element("ol", "");
    list.append(...(result.none ? result.nearest || [] : result.cards).map(line));
    if (list.children.length) parts.push(list);
    for (const skill of skills) {
      const hinted = hint(`Skill ${skill.name}: ${skill.description} `, `playbook skills export DIR --skill ${skill.name}`, "guide/agents.html#skills");
      parts.splice(result.none ? parts.findIndex((p) => p.textContent.includes(result.none)) : parts.length, 0, hinted);
    }
    const all = element("p", "");
    all.append(element("a", "Search all pages for this", {href: `?q=${encodeURIComponent(query)}`}));
    answer.replaceChildren(...parts, all);
    answer.hidden = false;
    return {cards: result.cards.map((c) => c.id), none: result.none || "", command, size, commands: more.map((m) => m[1]), pages: pages.map((p) => p[1]), skills: skills.map((s) => s.name)};
  }

  async function ask(query) {
    loaded = loaded || fetch(place).then((r) => r.json()).then(prepare);
    const shown = show(await loaded, query.slice(0, 2000));
    window.history.replaceState(null, "", "?ask=" + encodeURIComponent(query));
    return shown;
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); ask(input.value); });
  const given = new URLSearchParams(window.location.search).get("ask");
  if (given) { input.value = given; ask(given); }
  form.playbookAsk = ask;
})();
