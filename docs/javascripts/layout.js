// Which layouts are possible, in the browser: a port of playbook/planner/rules.py, layout.py, plan.py and search.py, which name the source of
// each rule. Models, choices and constants come from tables that Python writes; tests/site compares every sentence with Python's.
var PlaybookLayout = (function () {
  "use strict";

  const DEGREES = ["tp", "cp", "pp", "ep", "etp", "vpp"];
  const floorDiv = (a, b) => (a - a % b) / b;
  const range = (from, to) => Array.from({length: Math.max(0, to - from + 1)}, (_, i) => from + i);
  const sorted = (names) => [...names].sort();
  const both = (names, of) => sorted(names.filter((n) => of.includes(n)));

  // --- a plan from words, as playbook/planner/plan.py reads them ---------------------------------------------------------------------------

  function number(tables, key, text) {
    const least = key === "gbs" ? 0 : 1, most = key === "layers" ? tables.deepest : tables.largest, value = Number(text);
    if (!(/^[0-9]{1,10}$/.test(text) && least <= value && value <= most))
      throw new Error(`${key} is '${text.slice(0, 40)}'; expected a whole number from ${least} to ${most}`);
    if (tables.widths[key] && !tables.widths[key].includes(value))
      throw new Error(`${key} is ${text}; set it to one of ${tables.widths[key].join(", ")}`);
    return value;
  }

  function option(tables, key, text) {
    const kind = tables.options[key].kind;
    if (kind === "switch") {
      if (text !== "true" && text !== "false") throw new Error(`${key} is '${text.slice(0, 40)}'; set it to true or false`);
      return text === "true";
    }
    if (kind === "number") return number(tables, key, text);
    const parts = text.slice(0, 1000).split(",").filter(Boolean);
    if (kind === "numbers") return parts.map((p) => number(tables, key, p));
    return kind === "words" ? parts : text.slice(0, 100);
  }

  // `values` maps keys to text, as they stand in the page's address. Throws an Error that says what was expected.
  function parse(tables, model, values) {
    if (!Object.hasOwn(tables.models, model))
      throw new Error(`model '${model.slice(0, 40)}' is not known; expected one of ${Object.keys(tables.models).join(", ")}`);
    values = inOwnWords(tables, values);
    const plan = {model, shape: {...tables.models[model]}, ...tables.defaults, options: {}};
    for (const [key, field] of Object.entries(tables.options)) plan.options[key] = field.default;
    for (const [key, text] of Object.entries(values)) {
      if (Object.hasOwn(tables.options, key)) plan.options[key] = option(tables, key, text);
      else if (key === "layers") relayer(plan.shape, number(tables, key, text));
      else if (key === "experts") reexpert(plan.shape, number(tables, key, text));
      else if (key === "loss") plan.loss = word(tables, text);
      else if (key === "imbalance") plan.imbalance = ratio(text);
      else if (Object.hasOwn(tables.defaults, key)) plan[key] = number(tables, key, text);
      else throw new Error(`'${key.slice(0, 40)}' is not a setting`);
    }
    const torch = plan.options.backend === "torch";
    if (torch && !Object.hasOwn(values, "loss")) plan.loss = "torch";
    return plan;
  }

  // Words of other trainers as the planner's own, and what follows from the backend where nothing says it.
  function inOwnWords(tables, values) {
    const backend = Object.hasOwn(values, "backend") ? values.backend : "megatron", found = {...values}, count = (key) => number(tables, key, values[key] || "1");
    const named = Object.hasOwn(values, "sharding") ? values.sharding : backend === "torch" ? "fsdp2" : "", words = tables.sharding_words[backend] || {};
    if (named) found.sharding = Object.hasOwn(words, named) ? words[named] : named;
    if (named === "hsdp" && !Object.hasOwn(values, "optimizer_instances"))
      found.optimizer_instances = String(Math.max(1, floorDiv(count("gpus"), tables.node * count("pp"))));
    if (backend === "torch" && tables.deepspeed.includes(named) && !Object.hasOwn(values, "grad_bytes")) found.grad_bytes = "2";
    return found;
  }

  function reexpert(shape, experts) {
    if (!shape.experts) throw new Error(`experts is ${experts}, and the model has none; leave it out`);
    shape.experts = experts;
    shape.top_k = Math.min(shape.top_k, experts);
  }

  function relayer(shape, layers) {
    shape.dense_layers = shape.dense_layers === shape.layers ? layers : Math.min(layers, shape.dense_layers);
    shape.layers = layers;
    shape.blocks = shape.blocks.repeat(layers).slice(0, layers);
  }

  function word(tables, text) {
    const known = Object.keys(tables.losses);
    if (!known.includes(text)) throw new Error(`loss is '${text.slice(0, 40)}'; set it to one of ${known.join(", ")}`);
    return text;
  }

  function ratio(text) {
    const value = /^(?=\.?[0-9])[0-9]{0,10}\.?[0-9]{0,30}$/.test(text) ? Number(text) : 0;
    if (!(value >= 1 && value <= 1000)) throw new Error(`imbalance is '${text.slice(0, 40)}'; expected a ratio from 1 to 1000`);
    return value;
  }

  // --- what follows from the degrees -----------------------------------------------------------------------------------------------

  const dp = (p) => floorDiv(p.gpus, p.tp * p.cp * p.pp);
  const edp = (p) => floorDiv(p.gpus, p.etp * p.ep * p.pp);
  const globalBatch = (p) => p.gbs || p.mbs * Math.max(dp(p), 1) * p.pp;
  const microbatches = (p) => Math.max(1, floorDiv(globalBatch(p), p.mbs * Math.max(dp(p), 1)));
  const sequenceParallel = (p) => p.tp > 1 && p.options.sp !== false;
  const gcd = (a, b) => b ? gcd(b, a % b) : a;
  const lcm = (a, b) => a / gcd(a, b) * b;
  const minGpus = (p) => p.pp * lcm(p.tp * p.cp, p.ep * p.etp);

  // --- rules on degrees: playbook/planner/layout.py ----------------------------------------------------------------------------------------

  function broken(tables, p) {
    const low = ["gpus", "tp", "pp", "cp", "ep", "etp", "vpp", "mbs"].filter((k) => p[k] < 1);
    if (low.length) return low.map((k) => `${k === "mbs" ? "micro_batch_size" : k} is ${p[k]}; set it to 1 or more`);
    const found = [...grid(p), ...heads(p), ...chunks(p), ...experts(p)];
    if (p.cp > 1 && p.seq_len % (2 * p.cp))
      found.push(`seq_len ${p.seq_len} is not a multiple of 2 x cp = ${2 * p.cp} (each rank takes two chunks); change seq_len`);
    if (p.gpus % (p.tp * p.pp * p.cp) === 0) {
      const rows = p.mbs * dp(p);
      if (globalBatch(p) % rows)
        found.push(`global batch ${globalBatch(p)} is not a multiple of micro batch ${p.mbs} x dp ${dp(p)} = ${rows};` +
          ` set gbs to a multiple of ${rows}`);
      else if (p.vpp > 1 && microbatches(p) % p.pp)
        found.push(`vpp ${p.vpp} needs micro-batches in a multiple of pp ${p.pp}, and a step has ${microbatches(p)};` +
          " change gbs or set vpp to 1");
    }
    return [...found, ...RULES.flatMap((rule) => rule(p, p.options, tables))];
  }

  function grid(p) {
    const found = [], one = p.tp * p.pp * p.cp, other = p.etp * p.ep * p.pp;
    if (p.gpus % one) found.push(`${p.gpus} ranks do not divide into tp ${p.tp} x pp ${p.pp} x cp ${p.cp} = ${one}; start a multiple of ${one} ranks`);
    if (p.gpus % other)
      found.push(`${p.gpus} ranks do not divide into ep ${p.ep} x etp ${p.etp} x pp ${p.pp} = ${other}; start a multiple of ${other} ranks`);
    return found;
  }

  function heads(p) {
    const found = [], n = p.shape.heads, kv = p.shape.kv_heads;
    if (n % p.tp) found.push(`${n} attention heads do not divide over tp ${p.tp}; set tp to a divisor of ${n}`);
    else if (kv % p.tp && p.tp % kv) found.push(`${kv} key-value heads and tp ${p.tp}: one must be a multiple of the other; change tp`);
    return found;
  }

  function chunks(p) {
    const found = [], layers = p.shape.layers, count = p.pp * p.vpp, uneven = p.options.uneven !== false;
    if (uneven && count > layers + 2)
      found.push(`${layers} layers, embedding and output do not fill pp ${p.pp} x vpp ${p.vpp} = ${count} chunks; change pp`);
    else if (!uneven && layers % count)
      found.push(`${layers} layers do not divide into pp ${p.pp} x vpp ${p.vpp} = ${count} chunks; change pp`);
    if (p.vpp > 1 && p.pp === 1) found.push(`vpp ${p.vpp} needs pp > 1; set vpp to 1 or raise pp`);
    return found;
  }

  function experts(p) {
    if (p.ep > 1 && !p.shape.experts) return [`ep ${p.ep} on a model without experts; set ep to 1`];
    if (p.shape.experts % p.ep)
      return [`${p.shape.experts} experts do not divide over ep ${p.ep}; set ep to a divisor of ${p.shape.experts}`];
    return [];
  }

  // --- rules on features: playbook/planner/rules.py, in its order -------------------------------------------------------------------

  function labels(p, o, tables) {
    const given = {lora_targets: o.lora_targets, base: o.base ? [o.base] : [], dispatcher: o.dispatcher ? [o.dispatcher] : [], cp_comm: o.cp_comm ? [o.cp_comm] : [], sharding: [o.sharding],
      recompute: o.recompute, graphs: o.graphs, fp8: o.fp8 ? [o.fp8] : [], offload_modules: o.offload_modules};
    const found = Object.entries(given).flatMap(([key, names]) => {
      const wrong = sorted(new Set(names.filter((n) => !tables.labels[key].includes(n))));
      return wrong.length ? [`${key} ${wrong.join(", ")} is not known; set ${key} to one of ${tables.labels[key].join(", ")}`] : [];
    });
    if (sorted(o.rank_order.split("-")).join() !== "cp,dp,ep,pp,tp")
      found.push(`rank order ${o.rank_order} does not name tp, cp, ep, dp and pp once each; set it to tp-cp-ep-dp-pp`);
    return found;
  }

  function splitSequence(p) {
    const found = [], sp = sequenceParallel(p), both = p.tp * p.cp;
    if (p.tp > 1 && p.shape.experts && !sp)
      found.push(`tp ${p.tp} with experts trains only with sequence parallelism; set sp=true or tp to 1`);
    if (p.tp > 1 && sp && p.seq_len % both)
      found.push(`seq_len ${p.seq_len} is not a multiple of tp ${p.tp} x cp ${p.cp} = ${both} (sequence parallelism splits it); change seq_len`);
    return found;
  }

  function widths(p) {
    const s = p.shape, found = [], both = p.tp * p.cp;
    for (const [what, width, axis, degree] of [
      ["an expert width", s.expert_ffn, "etp", p.etp],
      ["an MLP width", s.dense_layers ? s.ffn : 0, "tp", p.tp],
      ["a shared-expert width", s.shared_ffn, "tp", p.tp],
    ]) if (width % degree) found.push(`${what} of ${width} does not divide over ${axis} ${degree}; set ${axis} to a divisor of ${width}`);
    const [keys, values] = s.mamba ? [s.mamba.groups, s.mamba.heads] : s.linear ? [s.linear.key_heads, s.linear.value_heads] : [0, 0];
    if (keys % both || values % both)
      found.push(`${keys} key and ${values} value heads of linear attention do not divide over tp x cp = ${both}; change tp or cp`);
    if (s.expert_bias && p.etp > 1) found.push(`experts with biases are not split, found etp ${p.etp}; set etp to 1`);
    return found;
  }

  function expertsGrid(p, o) {
    if (o.rank_order.endsWith("pp") || p.pp === 1 || p.gpus % (p.tp * p.cp * p.pp) || p.gpus % (p.etp * p.ep * p.pp)) return [];
    if (dp(p) === edp(p)) return [];
    return [`rank order ${o.rank_order} with pp ${p.pp} needs edp = dp, found edp ${edp(p)} and dp ${dp(p)}; set an order that ends in pp`];
  }

  const pipeline = (p, o) =>
    p.vpp > 1 && p.pp === 2 && !o.overlap_p2p ? [`vpp ${p.vpp} on pp 2 needs overlap of its transfers; set overlap_p2p=true or raise pp`] : [];

  function dispatcher(p, o, tables) {
    const found = [];
    if (tables.flex.includes(o.dispatcher) && p.etp * p.ep === 1)
      found.push(`dispatcher ${o.dispatcher} needs etp x ep > 1; raise ep or set dispatcher=alltoall`);
    if (o.dispatcher === "deepep" && o.capacity)
      found.push("dispatcher deepep excludes padding to capacity; set capacity=false or dispatcher=alltoall");
    if (o.dispatcher === "allgather" && o.shared_overlap && p.shape.shared_ffn)
      found.push("overlap of shared experts runs beside the dispatcher alltoall, found allgather; set dispatcher=alltoall or shared_overlap=false");
    if (o.dispatcher && !p.shape.experts)
      found.push(`dispatcher ${o.dispatcher} on a model without experts; change model or leave dispatcher out`);
    return found;
  }

  function context(p, o) {
    const found = [], product = o.cp_sizes.reduce((a, b) => a * b, 1);
    const held = Math.max(floorDiv(p.shape.kv_heads, p.tp), 1);
    const apart = o.cp_comm === "a2a" ? p.cp : o.cp_comm === "a2a+p2p" && o.cp_sizes.length ? o.cp_sizes[0] : 1, divided = p.shape.heads % (p.tp * apart);
    if (o.cp_comm.startsWith("a2a") && divided)
      found.push(`${p.shape.heads} heads do not divide over tp ${p.tp} x cp ${apart} for cp_comm ${o.cp_comm}; set cp_comm=p2p or change cp`);
    if (!divided && held % apart && (o.backend !== "torch" || apart % held))
      found.push(`the ${held} key-value heads of a tp rank do not divide over cp ${apart} for cp_comm ${o.cp_comm}; set cp_comm=p2p or change cp`);
    if (o.cp_comm === "a2a+p2p" && !o.cp_sizes.length)
      found.push("cp_comm a2a+p2p needs the sizes of its two levels; set cp_sizes, such as cp_sizes=2,4");
    if (o.cp_sizes.length && product !== p.cp) found.push(`cp_sizes ${o.cp_sizes.join("x")} = ${product} is not cp ${p.cp}; change cp_sizes`);
    return found;
  }

  function sharding(p, o) {
    const found = [], shards = floorDiv(p.gpus, p.tp * p.pp), experts = p.etp * p.ep * p.pp, instances = o.optimizer_instances;
    if (shards % instances)
      found.push(`dp x cp = ${shards} does not divide into ${instances} optimizer instances; change optimizer_instances`);
    else if (p.gpus % experts === 0 && p.gpus / experts % instances)
      found.push(`edp ${p.gpus / experts} does not divide into ${instances} optimizer instances; set optimizer_instances=1, or change ep or etp`);
    if (o.sharding === "fsdp2" && o.backend !== "torch" && (p.pp > 1 || p.ep > 1))
      found.push(`torch FSDP2 in megatron needs pp 1 and ep 1, found pp ${p.pp} and ep ${p.ep}; with pp 1 set sharding=fsdp, or change the degrees`);
    if (o.sharding === "fsdp" && o.backend !== "torch" && p.pp > 1)
      found.push(`Megatron-FSDP lays its mesh over all ranks and has no stages in it, found pp ${p.pp}; set pp to 1 or sharding=optimizer`);
    if (o.precision_aware && !["optimizer", "fsdp"].includes(o.sharding))
      found.push(`the precision-aware optimizer needs the distributed optimizer, found sharding ${o.sharding}; set sharding=optimizer`);
    return found;
  }

  function recompute(p, o) {
    const found = [], wanted = [...new Set(o.recompute)], sparse = both(wanted, ["moe", "moe_act", "shared_experts"]);
    if (wanted.includes("full") && wanted.length > 1)
      found.push(`recompute full stands alone, found ${o.recompute.join(", ")}; set recompute=full or name modules only`);
    if (!p.shape.experts && sparse.length) found.push(`recompute ${sparse.join(", ")} on a model without experts; change recompute`);
    if (!p.shape.mla && wanted.includes("mla_up_proj"))
      found.push("recompute mla_up_proj on a model without compressed attention; change recompute");
    if (!p.shape.linear && wanted.includes("gdn_norm_out"))
      found.push("recompute gdn_norm_out on a model without linear attention; change recompute");
    if (wanted.includes("shared_experts") && o.shared_overlap)
      found.push("recompute shared_experts excludes overlap of shared experts; change recompute or set shared_overlap=false");
    if (o.fp8 === "delayed" && both(wanted, ["moe_act", "layernorm"]).length)
      found.push("recompute of moe_act or layernorm excludes delayed FP8 scaling; change recompute or set fp8=blockwise");
    return found;
  }

  function graphs(p, o) {
    const modules = [...new Set(o.graphs)], again = o.recompute, found = [], sparse = both(modules, ["moe", "moe_router"]);
    if (!modules.length) return found;
    if (modules.includes("full_iteration"))
      return modules.length > 1 ? [`a graph of the full iteration stands alone, found ${o.graphs.join(", ")}; leave the parts out`] : [];
    if (again.includes("full")) found.push("full recompute excludes per-layer CUDA graphs; recompute selected modules, or capture the full iteration");
    if (modules.includes("moe") && !o.capacity)
      found.push("graphs moe needs padding to capacity, since dropless routing changes shapes; set graphs=moe_router,moe_preprocess");
    if (modules.includes("moe") && modules.includes("moe_router"))
      found.push("graphing 'moe' already covers 'moe_router'; keep one of the two");
    if (modules.includes("moe_preprocess") && !modules.includes("moe_router"))
      found.push("graphing 'moe_preprocess' needs 'moe_router' beside it; add it");
    if (sparse.length && again.includes("moe"))
      found.push("recompute of 'moe' excludes a graph over its router; recompute moe_act instead, or graph attn alone");
    if (!p.shape.experts && sparse.length) found.push(`graphs ${sparse.join(", ")} on a model without experts; change graphs`);
    if (modules.includes("mlp") && !p.shape.dense_layers) found.push("graphs mlp on a model without dense layers; change graphs");
    if (o.offload) found.push("offload of layers excludes graphs of modules; capture the full iteration, or set offload=false");
    return found;
  }

  function offload(p, o) {
    const found = [];
    if (o.offload && p.pp > 1) found.push(`offload of layers needs pp 1, found pp ${p.pp}; set pp to 1 or offload=false`);
    if (o.offload && o.recompute.length) found.push("offload of layers excludes recompute; leave one out");
    const away = o.offload_modules, routed = both(away, ["expert_fc1", "moe_act"]);
    if (o.offload && away.length) found.push("offload of layers and of modules are two ways to do one thing; choose one of them");
    if (away.includes("attn_proj") && !away.includes("core_attn"))
      found.push("offloading 'attn_proj' needs 'core_attn' beside it, whose output it is; add it");
    if (o.recompute.includes("moe") && routed.length)
      found.push("recompute of 'moe' makes again what offload of 'expert_fc1' and 'moe_act' would take away; leave one of them out");
    if (!p.shape.experts && routed.length)
      found.push("offload of 'expert_fc1' and 'moe_act' on a model without experts; change offload_modules");
    return found;
  }

  function overlap(p, o) {
    const found = [];
    if (o.delay_wgrad && !o.ep_overlap) found.push("delayed weight gradients need overlap of expert communication; set ep_overlap=true");
    if (!o.ep_overlap) return found;
    const again = both([...new Set(o.recompute)], ["full", "moe"]);
    if (p.ep === 1) found.push("overlap of expert communication needs ep > 1; raise ep or set ep_overlap=false");
    if (p.pp > 1 && p.vpp === 1) found.push(`overlap of expert communication with pp ${p.pp} needs vpp > 1; raise vpp`);
    if (o.dispatcher === "allgather") found.push("overlap of expert communication needs dispatcher alltoall or flex, found allgather; change dispatcher");
    if (again.length) found.push(`overlap of expert communication excludes recompute ${again.join(", ")}; change recompute`);
    if (both(o.graphs, ["moe", "mlp"]).length) found.push("overlap of expert communication excludes graphs of moe and mlp; change graphs");
    if (o.shared_overlap) found.push("overlap of expert communication excludes overlap of shared experts; set shared_overlap=false");
    if (p.shape.mtp > 1) found.push(`overlap of expert communication takes one MTP depth at most, the model has ${p.shape.mtp}; set ep_overlap=false`);
    return found;
  }

  function states(p, o, tables) {
    const found = [];
    if (o.backend === "torch" && o.sharding === "fsdp")
      found.push(`sharding ${o.sharding} is megatron's, and the backend is torch; set sharding=fsdp2`);
    if (o.recompute.includes("selective") && (o.backend !== "torch" || new Set(o.recompute).size > 1))
      found.push("recompute selective is torchtitan's and stands alone; set backend=torch or name modules");
    if (Math.max(o.optimizer_offload, o.offload_percent) > 100)
      found.push(`optimizer_offload ${o.optimizer_offload} and offload_percent ${o.offload_percent} are percents; set at most 100`);
    if (o.backend === "torch" && o.optimizer_offload && o.sharding === "none")
      found.push("an optimizer on the host needs data parallelism that shards; set sharding=fsdp2 or sharding=zero2");
    if (o.backend === "torch" && !tables.deepspeed.includes(o.sharding) && ![0, 100].includes(o.optimizer_offload))
      found.push(`FSDP2 has all of its shards on the host or none, found optimizer_offload ${o.optimizer_offload}; set optimizer_offload=100`);
    if (o.backend === "torch" && ["zero2", "zero3"].includes(o.sharding) && p.pp > 1)
      found.push(`DeepSpeed's ${o.sharding} excludes a pipeline, found pp ${p.pp}; set pp to 1 or sharding=zero1`);
    if (o.base && o.fp8) found.push("a base in 4 bits excludes FP8 products; leave one of them out");
    if (o.lora_targets.includes("experts") && !p.shape.experts)
      found.push("adapters of experts on a model without experts; change lora_targets");
    if (o.fp8_params && !o.fp8) found.push("fp8_params without a recipe; set fp8=blockwise");
    if (o.frozen.length && !p.shape.vision) found.push(`frozen ${o.frozen.join(", ")} on a model without a vision tower; leave frozen out`);
    return found;
  }

  const RULES = [labels, splitSequence, widths, expertsGrid, pipeline, dispatcher, context, sharding, recompute, graphs, offload, overlap, states];

  // --- the nearest legal layouts: playbook/planner/plan.py ------------------------------------------------------------------------------

  const round9 = (x) => Math.round(x * 1e9) / 1e9;
  const apart = (a, b) => round9(Math.abs(Math.log2(a) - Math.log2(b)));
  const powers = (most) => range(0, Math.floor(Math.log2(most))).map((i) => 2 ** i);

  function halfEven(x) {
    const low = Math.floor(x), rest = x - low;
    return rest > 0.5 || rest === 0.5 && low % 2 ? low + 1 : low;
  }

  function choices(tables, p, key) {
    const s = p.shape, wanted = p[key], most = Math.max(p.gpus, 1);
    const divisors = (n) => range(1, Math.min(n, most)).filter((i) => n % i === 0);
    const allowed = {
      tp: () => divisors(s.heads),
      cp: () => powers(most).filter((n) => n === 1 || p.seq_len % (2 * n) === 0),
      pp: () => range(1, Math.min(s.layers + 2, most)).filter((n) => most % n === 0 || n === wanted),
      ep: () => s.experts ? divisors(s.experts) : [1],
      etp: () => powers(most).filter((n) => (s.expert_ffn || 1) % n === 0),
      vpp: () => range(1, s.layers),
    }[key]();
    const near = allowed.sort((a, b) => apart(wanted, a) - apart(wanted, b) || a - b).slice(0, tables.nearest.choices);
    return near.includes(1) ? near : [...near, 1];
  }

  function sizes(tables, p) {
    const one = p.tp * p.cp * p.pp, other = p.etp * p.ep * p.pp, unit = lcm(one, other), below = floorDiv(p.gpus, unit) * unit;
    return [...new Set([p.gpus, below, below + unit])].filter((n) => 0 < n && n <= tables.largest).sort((a, b) => a - b);
  }

  function candidate(tables, p, gpus, degrees) {
    const rows = p.mbs * floorDiv(gpus, degrees.tp * degrees.cp * degrees.pp) * (degrees.vpp > 1 ? degrees.pp : 1);
    let distance = DEGREES.reduce((sum, k) => sum + apart(p[k], degrees[k]), 0), uneven = p.options.uneven, gbs = p.gbs;
    if (gpus !== p.gpus) distance += apart(p.gpus, gpus) + tables.nearest.other_gpus;
    const moved = degrees.pp !== p.pp || degrees.vpp !== p.vpp || uneven === false;
    if (p.shape.layers % (degrees.pp * degrees.vpp) && !uneven && moved) {
      uneven = uneven === false ? true : uneven;
      distance += tables.nearest.uneven;
    }
    if (gbs % rows) {
      gbs = Math.max(1, halfEven(gbs / rows)) * rows;
      distance += apart(p.gbs, gbs);
    }
    return {distance: round9(distance), gpus, ...degrees, gbs, uneven};
  }

  function candidates(tables, p) {
    const of = Object.fromEntries(DEGREES.map((k) => [k, choices(tables, p, k)])), found = [];
    for (const gpus of sizes(tables, p)) for (const tp of of.tp) for (const cp of of.cp) for (const pp of of.pp) {
      if (gpus % (tp * cp * pp)) continue;
      for (const ep of of.ep) for (const etp of of.etp) for (const vpp of pp > 1 ? of.vpp : [1])
        if (gpus % (etp * ep * pp) === 0) found.push(candidate(tables, p, gpus, {tp, cp, pp, ep, etp, vpp}));
    }
    const keys = ["distance", "gpus", ...DEGREES, "gbs", "uneven"];
    const compare = (a, b) => { for (const k of keys) if (a[k] !== b[k]) return a[k] - b[k]; return 0; };
    return found.sort(compare);
  }

  // Up to `count` legal plans as the settings that they change, nearest first.
  function nearest(tables, p, count) {
    const found = [];
    for (const {uneven, distance, ...settings} of candidates(tables, p)) {
      const plan = {...p, ...settings, options: {...p.options, uneven}};
      if (broken(tables, plan).length) continue;
      const changed = ["gpus", ...DEGREES, "gbs"].filter((k) => plan[k] !== p[k]).map((k) => [k, plan[k]]);
      if (uneven && p.options.uneven === false) changed.push(["uneven", true]);
      found.push({plan, distance, changes: Object.fromEntries(changed)});
      if (found.length === (count || 3)) break;
    }
    return found;
  }

  return {parse, broken, nearest, dp, edp, globalBatch, microbatches, sequenceParallel, minGpus, floorDiv, range};
})();
