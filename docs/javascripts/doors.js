// The page of a decision: what the planner answered to the nearest case of its table, every alternative beside the fastest, and the command for the exact one.
(function () {
  "use strict";
  const form = document.getElementById("pb-door"), answer = document.getElementById("pb-door-answer");
  if (!form) return;
  const {door, rows} = JSON.parse(document.getElementById("pb-door-data").textContent);
  const NEAR = 0.05;
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  const read = (name) => form.elements[name] ? form.elements[name].value : "";

  function element(name, content, extra = {}) {
    const made = Object.assign(document.createElement(name), extra);
    made.append(...[content].flat());
    return made;
  }

  const torch = (row) => row.settings.includes("backend=torch");
  const command = (q, row, more = "") => `playbook plan ${q.model} --gpus ${q.gpus} --hardware ${q.hardware} --seq ${q.seq_len}${q.network ? ` --network ${q.network}` : ""}` +
    `${row && torch(row) ? " --backend torch" : ""}${row && row.fixed ? ` --fix ${row.fixed}` : ""}${more}`;

  function table(shown) {
    const head = element("tr", ["", "tokens/s per GPU", "against the fastest", "GiB", "configuration"].map((t) => element("th", t)));
    const most = shown[0].speed;
    const lines = shown.map((r) => element("tr", r.speed ? [
      element("td", r === shown[0] ? element("strong", r.way) : r.way), element("td", `${whole(r.speed)} [${whole(r.low)}, ${whole(r.high)}]`),
      element("td", r === shown[0] ? "" : `${Math.round(100 * (r.speed / most - 1))} %`), element("td", whole(r.gib)), element("td", element("code", r.settings)),
    ] : [element("td", r.way), element("td", "nothing fits"), element("td", ""), element("td", ""), element("td", "")]));
    return element("div", element("table", [element("thead", head), element("tbody", lines)]), {className: "pb-scroll pb-compared", tabIndex: 0});
  }

  function show(data) {
    const {models} = data, model = playbookModels.named(models, read("model"));
    if (!model) return answer.replaceChildren(element("p", "No model of the planner has this name; for another, give playbook plan its config.json."));
    const q = {model, hardware: read("hardware"), gpus: Number(read("gpus")), seq_len: Number(read("seq_len")), network: read("network")};
    if (![q.gpus, q.seq_len].every((n) => Number.isInteger(n) && n >= 1)) return answer.replaceChildren(element("p", "GPUs and tokens are whole numbers from 1."));
    if (door === "dispatcher" && !models[model].moe) return answer.replaceChildren(element("p", `${model} has no experts, so it needs no dispatcher.`));
    const far = (r) => playbookModels.far(data, r, q) + (r.network === q.network ? 0 : 0.5);
    const near = rows.reduce((a, b) => far(b) < far(a) ? b : a), keys = ["model", "hardware", "gpus", "seq_len", "network"];
    const exact = keys.every((k) => near[k] === q[k]);
    const shown = rows.filter((r) => keys.every((k) => r[k] === near[k])).sort((a, b) => b.speed - a.speed);
    const where = `${near.model} on ${near.gpus} ${near.hardware}, ${whole(near.seq_len)} tokens a row${near.network ? `, ${near.network} between nodes` : ""}`;
    const parts = [element("p", [exact ? "" : element("strong", "The nearest case of the table, not yours: "), `${where}. `, ...(exact ? [] : ["Yours: ", element("code", command(q))])], {id: "pb-door-case"})];
    const best = shown[0];
    if (!best.speed) {
      parts.push(element("p", element("strong", "Nothing fits: take more GPUs, or allow less precise states or an optimizer on the host.")));
      parts.push(element("p", element("code", command(q, null, " --allow bf16-moments,offload"))));
      return answer.replaceChildren(...parts);
    }
    const tied = shown.filter((r) => r !== best && r.settings !== best.settings && r.speed > best.speed * (1 - NEAR));
    const share = best.way.startsWith("any") ? "" : `${best.way}: `;
    parts.push(element("p", [element("strong", [`${share}${whole(best.speed)} tokens/s per GPU, `, element("code", best.settings)])], {id: "pb-door-best"}));
    if (tied.length) parts.push(element("p", `Within ${100 * NEAR} %, for a pair of runs to tell apart: ${tied.map((r) => r.way).join(", ")}.`));
    parts.push(table(shown));
    parts.push(element("p", ["Start it: ", element("code", command(q, best, ` --export ${torch(best) ? "torchtitan" : "megatron-lm"}`))]));
    return answer.replaceChildren(...parts);
  }

  playbookModels.load().then((data) => {
    document.getElementById("pb-models").append(...Object.keys(data.models).map((m) => element("option", m)));
    const given = new URLSearchParams(window.location.search);
    for (const e of form.elements) if (e.name && given.has(e.name)) e.value = given.get(e.name);
    form.addEventListener("input", () => show(data));
    form.hidden = false;
    show(data);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
})();
