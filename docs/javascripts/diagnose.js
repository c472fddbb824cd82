// The short form of `playbook diagnose`, for every model and GPU of the planner: where a run stands between published runs and the prediction. Plans were asked
// beforehand for some models, GPUs and numbers of them; between two numbers the speed lies between theirs, evenly by the logarithm of the number. Elsewhere the
// nearest entry of that table is named as such, at its share of the peak, and judges nothing.
(function () {
  "use strict";
  const form = document.getElementById("pb-diagnose"), answer = document.getElementById("pb-diagnosis");
  if (!form) return;
  let known, models, gpus, runs, plans, silent, names, stepTokens;
  const NEAR = 0.05, EVEN = 0.05;
  const whole = (value) => Math.round(value).toLocaleString("en-US"), percent = (value) => `${Math.round(100 * value)}%`;
  const read = (name) => form.elements[name].value;

  function element(name, content, extra = {}) {
    const made = Object.assign(document.createElement(name), extra);
    made.append(...[content].flat());
    return made;
  }

  function range(runs) {
    const [low, high] = [runs.low, runs.high].map(runs.by === "tokens" ? whole : percent);
    return `${low === high ? low : `${low} to ${high}`} ${runs.by === "tokens" ? "tokens/s/GPU" : "MFU"}`;
  }

  function position(row, tokens) {
    const said = [], runs = row.published;
    if (runs) {
      const value = runs.by === "tokens" ? tokens : tokens / row.tokens_per_mfu;
      const where = value < runs.low * (1 - NEAR) ? "below published runs" : value > runs.high * (1 + NEAR) ? "above published runs" : "where published runs are";
      const more = runs.by === "tokens" ? runs.high / tokens - 1 : 0;
      said.push(`you are ${where}: ${range(runs)} ${runs.shared}${more > EVEN ? `, the fastest ${percent(more)} faster than you` : ""}`);
    }
    const inside = tokens < row.low ? "below" : tokens > row.high ? "above" : "inside";
    if (row.speed) said.push(`you reach ${percent(tokens / row.speed)} of what the planner predicts for the fastest layout, ${inside} its 80 % interval`);
    if (runs && runs.predicted) {
      const [low, high] = runs.predicted.map(percent);
      said.push(`of the speed of those published runs the planner predicts ${low === high ? low : `${low} to ${high}`}`);
    }
    return said.join("; ");
  }

  const sentence = (words) => words ? `${words[0].toUpperCase()}${words.slice(1)}.` : "No published run and no plan of this model is near.";

  // What a pasted file says: a model's sizes, or the kind of GPU that it names and the best product that a calibration measured, in FLOP/s. Null of nothing, and of what names no known GPU.
  function pasted(text) {
    const whole = text.slice(0, 5e6), stated = whole.match(/^["{\s]*gpu"?\s*:\s*["']?([^"'#\n,}]+)/m);
    let name = stated ? stated[1] : "", best = 0;
    try {
      const data = JSON.parse(whole), text = data.text_config || data;
      const sizes = [text.num_hidden_layers ?? text.n_layer, text.hidden_size ?? text.n_embd, text.num_attention_heads ?? text.n_head,
        text.num_experts ?? text.num_local_experts ?? text.n_routed_experts ?? 0, text.vocab_size ?? data.vocab_size].map(Number);
      if (sizes.every((n) => Number.isSafeInteger(n) && n >= 0) && sizes[0] && sizes[1]) return {sizes};
      name = data.gpu || data.device.name;
      for (const row of data.rows || []) if (row.kind === "linear" && row.flops_per_s > best) best = row.flops_per_s;
    } catch { /* a hardware file may be YAML */ }
    const plain = String(name).slice(0, 200).toLowerCase().replace(/^([0-9]+)x/, "$1x ").replace(/[^a-z0-9]+/g, " ").replace(new RegExp(silent, "g"), "").replaceAll(" ", "");
    return Object.hasOwn(names, plain) ? {gpu: names[plain], best} : null;
  }

  // What is known of so many GPUs: asked, between two numbers that were, or the nearest entry alone. Undefined where no plan fits.
  function rowOf(model, gpu, number) {
    const [peak, reached] = gpus[gpu], published = models[model].published[gpu], same = plans.filter((p) => p.model === model && p.hardware === gpu);
    const row = {model, hardware: gpu, gpus: number, peak, reached, tokens_per_mfu: peak / models[model].flops, step_tokens: stepTokens / number, speed: 0, published: null};
    if (published) {
      const [shared, by, low, high, predicted, rows] = published;
      row.published = {shared, by, low, high, predicted, rows: rows.map(([id, other]) => ({id, other, ...runs[id]}))};
    }
    const exact = same.find((p) => p.gpus === number);
    if (exact) return exact.speed ? {...row, ...exact} : undefined;
    const below = same.findLast((p) => p.gpus < number), above = same.find((p) => p.gpus > number);
    if (!below || !above || !below.speed || !above.speed) return {...row, near: plans.filter((p) => p.speed).reduce((a, b) => playbookModels.far(known, b, row) < playbookModels.far(known, a, row) ? b : a)};
    const part = Math.log(number / below.gpus) / Math.log(above.gpus / below.gpus);
    const lerp = (key) => below[key] * (above[key] / below[key]) ** part;
    return {...row, speed: lerp("speed"), mfu: lerp("mfu"), low: Math.min(below.low, above.low), high: Math.max(below.high, above.high), between: [below, above]};
  }

  function fastest(row) {
    if (row.near) {
      const {near} = row;
      return `nearest entry of the table: ${near.model} on ${near.gpus} ${near.hardware}, ${percent(near.mfu)} MFU (${near.settings}); at that share of the peak ${whole(near.mfu * row.tokens_per_mfu)} tokens/s/GPU here. Yours: playbook plan ${row.model} --gpus ${row.gpus} --hardware ${row.hardware}`;
    }
    const speed = `${whole(row.speed)} tokens/s/GPU [${whole(row.low)}, ${whole(row.high)}], ${percent(row.mfu)} MFU`;
    if (!row.between) return `${speed}, ${whole(row.gib)} GiB: ${row.settings}`;
    return `${speed}: between ${row.between.map((r) => `${whole(r.speed)} on ${r.gpus} GPUs (${r.settings})`).join(" and ")}`;
  }

  function show() {
    const number = Number(read("gpus"));
    if (!(number >= 1 && Number.isInteger(number))) return answer.replaceChildren(element("p", "Say on how many GPUs it runs: a whole number from 1."));
    const text = read("file").trim(), file = text ? pasted(text) : null;
    if (text && !file) return answer.replaceChildren(element("p", "The file names no GPU that is known, and no model: expected a config.json, a calibration of playbook calibrate, or a hardware file with gpu: KIND."));
    if (file && file.gpu) form.elements.gpu.value = file.gpu;
    const like = file && file.sizes ? playbookModels.sized(models, file.sizes) : null, model = like ? like.model : playbookModels.named(models, read("model"));
    if (!model) return answer.replaceChildren(element("p", "No model of the planner has this name: choose one of the list, or paste its config.json."));
    const row = rowOf(model, read("gpu"), number);
    const given = Number(read("speed")), unit = read("unit");
    if (!row) return answer.replaceChildren(element("p", "No plan of this model fits so few of these GPUs, by the planner; choose more."));
    const tokens = {"% MFU": given / 100 * row.tokens_per_mfu, "tokens/s per GPU": given, "seconds a step": row.step_tokens / given}[unit];
    const option = {"% MFU": `--mfu ${given}`, "tokens/s per GPU": `--tokens-per-s ${given}`, "seconds a step": `--step-time ${given}s`}[unit];
    const lines = [["fastest", fastest(row)]];
    for (const run of row.published ? row.published.rows : []) {
      lines.push(["published", `${whole(run.tokens_per_s_per_gpu)} tokens/s/GPU, ${percent(run.mfu)} MFU: ${run.model} on ${run.gpus || "?"} ${run.hardware} ${run.layout} (${run.id}${run.other ? `; ${run.other}` : ""}${run.predicted ? `; the planner says ${whole(run.predicted)}` : ""})`]);
    }
    const share = tokens / row.tokens_per_mfu, reached = Math.max(row.reached, file && file.best ? file.best / row.peak : 0);
    if (share > reached) {
      const check = `expected at most ${percent(reached)}, which the best matrix product reaches. Check your token count: batch, GPUs, and that tokens/s are of one GPU`;
      return answer.replaceChildren(element("p", `That means ${whole(tokens)} tokens/s on each GPU, ${percent(share)} of its peak; ${check}.`, {id: "pb-position"}));
    }
    const speed = given > 0 && isFinite(tokens);
    if (speed) lines.unshift(["you", `${whole(tokens)} tokens/s/GPU, ${percent(tokens / row.tokens_per_mfu)} MFU, ${(row.step_tokens / tokens).toFixed(2)} s a step`]);
    if (like) lines.push(["file", like.exact ? `has the sizes of ${model}` : `has no sizes of a model here; figures are of the nearest, ${model}, and the command is of the file`]);
    if (file && file.gpu) lines.push(["file", `names ${file.gpu}${file.best ? `, its products reach ${percent(file.best / row.peak)} of the peak` : ""}; the prediction here is of the table's ${file.gpu}, the command's is of the file`]);
    answer.replaceChildren(
      element("p", element("strong", speed ? sentence(position(row, tokens)) : "Say how fast it runs."), {id: "pb-position"}),
      element("dl", lines.flatMap(([name, words]) => [element("dt", name), element("dd", words)]), {className: "pb-lines"}),
      element("p", ["Likely wall, and what to try first, with verdict, gain, flags and test: ",
        element("code", `playbook diagnose --model ${like && !like.exact ? "config.json" : row.model} --gpus ${row.gpus} --gpu ${file && file.gpu ? "FILE" : row.hardware}${speed ? ` ${option}` : ""}`)]),
      element("p", element("a", "How fast a layout of your own is, and what each GPU then holds", {href: `_generated/calculator.html?${new URLSearchParams({model: row.model, gpus: row.gpus, gpu: row.hardware})}`})),
    );
  }

  async function start() {
    known = await playbookModels.load();
    ({models, gpus, runs, plans, step: stepTokens, silent, names} = known);
    form.addEventListener("input", show);
    form.hidden = false;
    show();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  start();
})();
