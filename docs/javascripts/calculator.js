// The layout calculator: form to plan to answer. The address holds the settings, so that a layout can be shared.
(function () {
  "use strict";
  const form = document.getElementById("pb-layout"), answer = document.getElementById("pb-answer"), line = document.getElementById("pb-line");
  const tables = JSON.parse(document.getElementById("pb-tables").textContent);
  const controls = [...form.elements].filter((e) => e.name);
  const keys = [...new Set(controls.map((e) => e.name))];
  const GIB = 2 ** 30;
  const PARTS = ["parameters", "gradients", "optimizer", "fp8_weights", "gathered", "activations", "transient", "workspace"];

  // --- settings: what differs from the defaults, as text ---------------------------------------------------------------------------

  const APART = ["model", "gpu"];  // named by options of their own, not by a setting

  function fallback(key) {
    if (Object.hasOwn(tables.options, key)) {
      const value = tables.options[key].default;
      return value === null ? "" : String(value);
    }
    return Object.hasOwn(tables.defaults, key) ? String(tables.defaults[key]) : "";
  }

  function read(key) {
    const found = controls.filter((e) => e.name === key);
    return found[0].type === "checkbox" ? found.filter((e) => e.checked).map((e) => e.value).join(",") : found[0].value.trim();
  }

  function write(key, text) {
    for (const control of controls.filter((e) => e.name === key)) {
      if (control.type === "checkbox") control.checked = text.split(",").includes(control.value);
      else control.value = text;
    }
  }

  function settings() {
    const found = {};
    for (const key of keys) {
      const text = read(key);
      if (!APART.includes(key) && text !== fallback(key) && !(text === "" && key !== "sharding")) found[key] = text;
    }
    return found;
  }

  function fromAddress() {
    const query = new URLSearchParams(window.location.search);
    const unknown = [...query.keys()].filter((k) => !keys.includes(k) && k !== "h");
    if (!keys.some((k) => query.has(k))) return unknown;
    for (const key of keys) write(key, query.has(key) ? query.get(key) : APART.includes(key) ? read(key) : fallback(key));
    if (!Object.hasOwn(tables.gpus, read("gpu"))) write("gpu", Object.keys(tables.gpus)[0]);
    return unknown;
  }

  const pairs = (given) => Object.entries(given).map(([k, v]) => `${k}=${v}`);
  const address = (model, given) => "?" + new URLSearchParams({model, gpu: read("gpu"), ...given}).toString().replaceAll("%2C", ",");

  // --- the answer ------------------------------------------------------------------------------------------------------------------

  function element(name, content, attributes) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    for (const part of [content].flat()) if (part !== undefined && part !== null) node.append(part);
    return node;
  }

  function table(head, rows) {
    const cells = (row, name) => row.map((c, i) => element(name, String(c), i && typeof c === "number" ? {class: "pb-number"} : {}));
    const body = rows.map((row) => element("tr", cells(row, "td")));
    return element("div", element("table", [element("thead", element("tr", cells(head, "th"))), element("tbody", body)], {class: "pb-table"}), {class: "pb-scroll", tabindex: "0"});
  }

  const big = (n) => n >= 1e12 ? `${(n / 1e12).toFixed(2)} T` : n >= 1e9 ? `${(n / 1e9).toFixed(2)} B` : `${(n / 1e6).toFixed(1)} M`;
  const gib = (bytes) => (bytes / GIB).toFixed(2);

  function figures(plan) {
    const L = PlaybookLayout, shape = plan.shape;
    return table(["Figure", "Value"], [
      ["Data parallel, DP", L.dp(plan)],
      ["Expert data parallel, EDP", L.edp(plan)],
      ["Fewest GPUs of one copy", L.minGpus(plan)],
      ["Global batch", L.globalBatch(plan)],
      ["Microbatches per step and rank", L.microbatches(plan)],
      ["Pipeline bubble", `${(100 * PlaybookMemory.bubble(plan)).toFixed(1)} %`],
      ["Parameters", big(PlaybookMemory.total(shape))],
      ["Parameters that a token meets", big(PlaybookMemory.active(shape))],
      ["GFLOP per token, both passes", (PlaybookMemory.flopsPerToken(tables, shape, plan.seq_len) / 1e9).toFixed(2)],
    ]);
  }

  const NAMES = {products: "matrix products", grouped: "experts' products", elementwise: "elementwise kernels", host: "waiting for the host", tp: "tensor parallel transfers",
    ep: "expert parallel transfers", cp: "context parallel transfers", pp: "transfers between stages", bubble: "waiting for the pipeline", offload: "offload", dp: "gradients and weights",
    stragglers: "waiting for the slowest rank"};

  // What a step takes on the GPU that is chosen, and where it goes.
  function speed(plan, model, given) {
    const gpu = read("gpu"), number = (n) => Math.round(n).toLocaleString("en");
    if (plan.options.fp8 && !tables.gpus[gpu].has_fp8) return [element("h2", "Speed"), element("p", `No speed: ${gpu} has no 8-bit products.`)];
    const found = PlaybookTime.step(tables, plan, gpu), parts = Object.entries(found.parts).sort((a, b) => b[1] - a[1]);
    const degrees = ["tp", "cp", "pp", "vpp", "ep", "etp", "mbs"], apart = [...degrees, "gpus", "seq_len", "gbs", "layers", "experts", "backend"];
    const chosen = plan.ep * plan.etp > 1 ? {recompute: "", dispatcher: "alltoall", ep_overlap: "false"} : {recompute: ""};
    const fixed = [...degrees.map((k) => `${k}=${plan[k]}`), ...pairs({...chosen, ...given}).filter((word) => !apart.includes(word.split("=")[0]))];
    const asked = ["playbook plan", model, "--gpus", plan.gpus, "--hardware", gpu, "--seq", plan.seq_len, "--gbs", PlaybookLayout.globalBatch(plan),
      ...(plan.options.backend === "torch" ? ["--backend torch"] : []), ...["layers", "experts"].filter((k) => given[k]).map((k) => `--${k} ${given[k]}`),
      "--fix", fixed.join(","), "--no-published"].join(" ");
    return [
      element("h2", "Speed"),
      element("p", [element("strong", `${number(found.value)} tokens/s/GPU`, {id: "pb-speed"}), ` on ${gpu}, 80 % between ${number(found.low)} and ${number(found.high)}; `,
        `${found.seconds.toFixed(2)} s a step, ${(100 * found.mfu).toFixed(0)} % of the peak. Predicted from the layout alone; without --no-published the command scales it to published runs:`]),
      element("pre", element("code", asked), {id: "pb-speed-command", class: "pb-command", tabindex: "0"}),
      table(["Of a step", "s", "share"], parts.map(([name, s]) => [NAMES[name] || name, s.toFixed(3), `${(100 * s / found.seconds).toFixed(0)} %`])),
    ];
  }

  function bar(stage, most) {
    const shown = PARTS.filter((part) => stage[part] > 0);
    const pieces = shown.map((part) => element("span", "", {class: `pb-part-${part}`, style: `width: ${100 * stage[part] / most}%`, title: `${part.replace("_", " ")} ${gib(stage[part])} GiB`}));
    return element("div", [element("span", `stage ${stage.stage}`, {class: "pb-stage"}), element("span", pieces, {class: "pb-bar", "aria-hidden": "true"})], {class: "pb-stack"});
  }

  function memory(plan) {
    let stages;
    try {
      stages = PlaybookMemory.estimate(tables, plan);
    } catch (error) {
      return [element("h2", "Memory of each GPU"), element("p", `No estimate: ${error.message}.`)];
    }
    const most = Math.max(...stages.map((s) => s.peak)), fullest = stages.find((s) => s.peak === most);
    const used = PARTS.filter((part) => stages.some((s) => s[part] > 0));
    const legend = element("p", used.map((part) => element("span", part.replace("_", " "), {class: `pb-key pb-part-${part}`})), {class: "pb-legend"});
    const rows = stages.map((s) => [s.stage, s.layers, s.in_flight.join("+"), ...used.map((part) => gib(s[part])), gib(s.peak)]);
    return [
      element("h2", "Memory of each GPU"),
      element("p", [element("strong", `${(most / GIB).toFixed(1)} GiB`, {id: "pb-peak"}), ` allocated at the peak, on stage ${fullest.stage}. `,
        element("span", holders(most), {id: "pb-holders"})]),
      ...stages.map((s) => bar(s, most)), legend,
      table(["Stage", "Layers", "In flight", ...used.map((part) => part.replace("_", " ")), "peak, GiB"], rows),
    ];
  }

  // GPUs that have so many bytes and five percent more.
  function holders(bytes) {
    const fitting = Object.entries(tables.gpu_gib).filter(([, gib]) => bytes / GIB <= (1 - tables.tight) * gib).map(([name]) => name);
    return fitting.length ? `It fits ${fitting.join(", ")}.` : "No GPU that is known here has that much.";
  }

  // Whether the kind of GPU that is chosen holds the peak, in the words of the command line, and how fast the layout is there.
  function onGpu(plan, peak) {
    const gpu = read("gpu"), gib = tables.gpu_gib[gpu], fit = peak / GIB > gib ? "does not fit" : peak / GIB > (1 - tables.tight) * gib ? "tight" : "fits";
    const fast = fit === "does not fit" || (plan.options.fp8 && !tables.gpus[gpu].has_fp8) ? "" : `; ${Math.round(PlaybookTime.step(tables, plan, gpu).value).toLocaleString("en")} tokens/s/GPU`;
    return `On ${gpu}: ${fit}, ${(peak / GIB).toFixed(1)} of ${gib} GiB at the peak${fast}.`;
  }

  // The answer in one line, which stays in sight while settings change.
  function verdict(plan, broken) {
    let peak = null;
    try {
      peak = Math.max(...PlaybookMemory.estimate(tables, plan).map((s) => s.peak));
    } catch { /* no estimate, as the section on memory says */ }
    const fits = broken.length === 0 && (peak === null || !holders(peak).startsWith("No GPU"));
    const legal = fits ? "This layout can run." : "This layout breaks no rule, and no GPU holds it.";
    const words = broken.length ? `${broken.length} broken rule${broken.length > 1 ? "s" : ""}, below.` : legal;
    const size = broken.length || peak === null ? "" : ` ${onGpu(plan, peak)} ${fits ? holders(peak) : ""}`;
    return element("p", [element("strong", words), size], {class: fits ? "pb-confirmed" : "pb-refuted", id: "pb-legal"});
  }

  function rules(plan, broken, model, given) {
    if (!broken.length) return [];
    const shown = [];
    shown.push(element("ul", broken.map((sentence) => element("li", sentence)), {id: "pb-broken"}));
    const offers = PlaybookLayout.nearest(tables, plan);
    if (!offers.length) {
      shown.push(element("p", "No choice of degrees makes this legal: first change the options that the rules above name."));
      return shown;
    }
    const links = offers.map(({changes}) => element("li", element("a", pairs(changes).join(" "), {href: address(model, {...given, ...changes})})));
    return [...shown, element("p", "Nearest layouts that can run:"), element("ul", links, {id: "pb-nearest"})];
  }

  function show() {
    const model = read("model"), given = settings();
    const command = ["playbook layout check --model", model, ...pairs(given)].join(" ");
    let plan;
    try {
      plan = PlaybookLayout.parse(tables, model, given);
    } catch (error) {
      line.replaceChildren(element("p", error.message, {class: "pb-refuted", id: "pb-legal"}));
      answer.replaceChildren();
      return;
    }
    const broken = PlaybookLayout.broken(tables, plan);
    const rest = broken.length ? [] : [element("h2", "What follows"), figures(plan), ...speed(plan, model, given), ...memory(plan)];
    line.replaceChildren(verdict(plan, broken));
    answer.replaceChildren(...rules(plan, broken, model, given), element("pre", element("code", command), {id: "pb-layout-command", class: "pb-command", tabindex: "0"}), ...rest);
    window.history.replaceState(null, "", address(model, given) + window.location.hash);
  }

  const unknown = fromAddress();
  form.hidden = false;
  show();
  if (unknown.length) answer.prepend(element("p", `Not settings, and left out: ${unknown.map((k) => k.slice(0, 40)).join(", ")}.`));
  form.addEventListener("input", show);
  form.addEventListener("reset", () => window.setTimeout(show));
  form.addEventListener("submit", (event) => event.preventDefault());
})();
