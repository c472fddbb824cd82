// Parameters, memory per rank and FLOPs per token, in the browser: a port of playbook/planner/parameters.py, activations.py, pipeline.py, memory.py and
// flops.py, which name the source of each formula. Constants come from tables that Python writes; tests/site compares the figures with Python's.
var PlaybookMemory = (function (layout) {
  "use strict";

  const {floorDiv, range} = layout;
  const ceilDiv = (a, b) => floorDiv(a + b - 1, b);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const HALVES = {M: ["mamba", ""], "*": ["attention", ""], E: ["", "experts"], "-": ["", "mlp"]};

  // The halves of a layer; an index past the last layer is a depth of multi-token prediction.
  function parts(s, index) {
    if (s.blocks) return index < s.layers ? HALVES[s.blocks[index]] : ["attention", "experts"];
    const i = Math.min(index, s.layers - 1), linear = s.linear && (i + 1) % s.linear.full_every !== 0;
    return [linear ? "linear" : "attention", i < s.dense_layers ? "mlp" : "experts"];
  }

  // --- parameters ------------------------------------------------------------------------------------------------------------------

  function layer(s, index) {
    const [mixer, ffn] = parts(s, index), attention = mixerParameters(s, mixer);
    const repeated = attention.repeated + floorDiv(normed(s) * s.norms * ((mixer ? 1 : 0) + (ffn ? 1 : 0)), 2);
    const bias = s.mlp_bias && ffn ? [up(s) * s.ffn, s.hidden] : [0, 0], wide = up(s) + 1;
    if (ffn !== "experts")
      return {sharded: attention.sharded + (ffn ? wide * s.hidden * s.ffn : 0) + bias[0], repeated: repeated + bias[1], experts: 0};
    const router = s.hidden * s.experts + (s.shared_gate ? s.hidden : 0) + (s.expert_bias ? s.experts : 0) + 2 * s.hidden * s.latent;
    return {sharded: attention.sharded + wide * s.hidden * s.shared_ffn, repeated: repeated + router, experts: s.experts * expert(s)};
  }

  const up = (s) => s.gated ? 2 : 1, normed = (s) => (s.norm_bias ? 2 : 1) * s.hidden;
  const width = (s) => s.latent || s.hidden;
  const expert = (s) => (up(s) + 1) * width(s) * s.expert_ffn + (s.expert_bias ? up(s) * s.expert_ffn + width(s) : 0);
  const adapters = (t, s, index, o) => o.lora * sum(pairs(t, s, index, o).map(([, a, b, count]) => (a + b) * (count || 1)));

  // The adapters of one layer: name and widths of each matrix, and how many pairs stand beside it.
  function pairs(t, s, index, o) {
    if (!o.lora) return [];
    const torch = o.backend === "torch", groups = t.lora_targets, [mixer, ffn] = parts(s, index), h = s.hidden, wide = up(s), m = s.mla;
    const names = o.lora_targets.length ? o.lora_targets : torch ? ["attention", "mlp"] : ["attention", "mlp", "experts"];
    const fused = torch ? [] : names.filter((n) => n in groups), covered = fused.flatMap((n) => groups[n]);
    const single = names.filter((n) => torch || !(n in groups)).flatMap((n) => groups[n] || [n]).filter((n) => !covered.includes(n)), found = [];
    const has = (name) => single.includes(name);
    if (mixer === "attention" && m) {
      const n = s.heads, q = n * (m.nope_dim + m.rope_dim), every = fused.includes("attention");
      if (every || has("q")) found.push(...(m.q_rank ? [["q", h, m.q_rank], ["q", m.q_rank, q]] : [["q", h, q]]));
      if (every || has("k")) found.push(["k", h, m.kv_rank + m.rope_dim]);
      if (every || has("v")) found.push(["v", m.kv_rank, n * (m.nope_dim + m.v_dim)]);
      if (every || has("o")) found.push(["o", n * m.v_dim, h]);
    } else if (mixer) {
      const q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
      if (fused.includes("attention")) found.push(["attention", h, q + 2 * kv], ["attention", q, h]);
      for (const [name, size] of Object.entries({q: [h, q], k: [h, kv], v: [h, kv], o: [q, h]})) if (has(name)) found.push([name, ...size]);
    }
    const mlp = (inner) => {
      if (fused.includes("mlp")) found.push(["mlp", h, wide * inner], ["mlp", inner, h]);
      for (const name of ["up", "gate"].slice(0, wide)) if (has(name)) found.push([name, h, inner]);
      if (has("down")) found.push(["down", inner, h]);
    };
    if (ffn === "mlp") mlp(s.ffn);
    if (ffn === "experts" && s.shared_ffn) mlp(s.shared_ffn);
    if (ffn === "experts" && names.includes("experts"))
      found.push(...[[width(s), wide * s.expert_ffn], [s.expert_ffn, width(s)]].map((size) => ["experts", ...size, torch ? s.experts : 1]));
    return found;
  }

  const embedding = (s) => s.vocab * s.hidden;
  const all = (x) => x.sharded + x.repeated + x.experts;
  const tables = (s) => (s.tied ? 1 : 2) * embedding(s) + s.positions * s.hidden;
  const decoder = (s) => sum(range(0, s.layers - 1).map((i) => all(layer(s, i)))) + tables(s) + normed(s);

  function mtp(s) {
    const last = layer(s, s.layers);
    return {sharded: last.sharded + 2 * s.hidden ** 2, repeated: last.repeated + 3 * s.hidden, experts: last.experts};
  }

  const sparseLayers = (s) => range(0, s.layers - 1).filter((i) => parts(s, i)[1] === "experts").length;
  const active = (s) => decoder(s) - (s.experts ? sparseLayers(s) * (s.experts - s.top_k) * expert(s) : 0);
  const total = (s) => decoder(s) + (s.mtp ? s.mtp * all(mtp(s)) : 0) + vision(s);

  function vision(s) {
    const t = s.vision;
    if (!t) return 0;
    const h = t.hidden, wide = h * t.merge ** 2, merge = wide * wide + wide + wide * s.hidden + s.hidden;
    const patches = t.patch_values * h + h + t.positions * h, block = 4 * h * h + 4 * h + 2 * h * t.ffn + t.ffn + h + 4 * h;
    return patches + t.depth * block + merge + 2 * h + t.deepstack * (merge + 2 * wide);
  }

  function mixerParameters(s, mixer) {
    const h = s.hidden;
    if (!mixer) return {sharded: 0, repeated: 0};
    if (mixer === "mamba") {
      const m = s.mamba, inner = m.heads * m.head_dim, shared = 2 * m.groups * m.state;
      return {sharded: h * (2 * inner + shared + m.heads) + (m.conv + 1) * (inner + shared) + 3 * m.heads + inner + inner * h, repeated: 0};
    }
    if (mixer === "linear") {
      const g = s.linear, qk = g.key_heads * g.head_dim, v = g.value_heads * g.head_dim;
      return {sharded: h * (2 * qk + 2 * v + 2 * g.value_heads) + g.conv * (2 * qk + v) + 2 * g.value_heads + v * h, repeated: g.head_dim};
    }
    if (s.mla) {
      const m = s.mla, up = (m.q_rank || h) * s.heads * (m.nope_dim + m.rope_dim) + m.kv_rank * s.heads * (m.nope_dim + m.v_dim);
      return {sharded: up + s.heads * m.v_dim * h, repeated: h * m.q_rank + h * (m.kv_rank + m.rope_dim) + m.q_rank + m.kv_rank};
    }
    const q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim, bias = s.attention_bias;
    return {
      sharded: h * q * (s.attention_gate ? 2 : 1) + 2 * h * kv + q * h + (bias ? q + 2 * kv : 0) + (s.sinks ? s.heads : 0),
      repeated: (s.qk_norm ? s.qk_norm_wide ? q + kv : 2 * s.head_dim : 0) + (s.output_bias ? h : 0),
    };
  }

  // --- FLOPs -----------------------------------------------------------------------------------------------------------------------

  function flopsPerToken(tables, s, seqLen) {
    const depths = range(0, s.layers + s.mtp - 1), wide = up(s) + 1;
    const experts = wide * (width(s) * s.top_k * s.expert_ffn + s.hidden * s.shared_ffn) + 2 * s.hidden * s.latent;
    const mlp = (i) => ({"": 0, mlp: wide * s.hidden * s.ffn, experts})[parts(s, i)[1]];
    const heads = s.hidden * s.vocab * (1 + s.mtp) + s.mtp * (2 * s.hidden ** 2 + 3 * s.hidden);
    return 2 * tables.backward * (sum(depths.map((i) => mixerFlops(s, i, seqLen) + mlp(i))) + heads);
  }

  // Of a forward pass, what multiplies by a weight, without the router: attention itself and recurrences are left out.
  function weightFlops(s) {
    const depths = range(0, s.layers + s.mtp - 1).map((i) => Math.min(i, s.layers)), h = s.hidden, wide = up(s) + 1;
    const recurrence = (mixer) => {
      if (mixer === "mamba") return 3.5 * s.mamba.heads * s.mamba.head_dim * s.mamba.state;
      if (mixer !== "linear") return 0;
      const g = s.linear, qk = g.key_heads * g.head_dim, v = g.value_heads * g.head_dim;
      return g.conv * (2 * qk + v) + 4 * v * g.head_dim;
    };
    const experts = wide * (width(s) * s.top_k * s.expert_ffn + h * s.shared_ffn) + 2 * h * s.latent;
    const layers = depths.map((i) => mixerFlops(s, i, 0) - recurrence(parts(s, i)[0]) + ({"": 0, mlp: wide * h * s.ffn, experts})[parts(s, i)[1]]);
    return 2 * (sum(layers) + h * s.vocab * (1 + s.mtp) + s.mtp * (2 * h ** 2 + 3 * h));
  }

  function mixerFlops(s, index, seqLen) {
    const h = s.hidden, n = s.heads, d = s.head_dim, mixer = parts(s, index)[0];
    if (!mixer) return 0;
    if (mixer === "mamba") {
      const m = s.mamba, inner = m.heads * m.head_dim;
      return h * (3 * inner + 2 * m.groups * m.state + m.heads) + 3.5 * inner * m.state;
    }
    if (mixer === "linear") {
      const g = s.linear, qk = g.key_heads * g.head_dim, v = g.value_heads * g.head_dim;
      return h * (2 * qk + 2 * v + 2 * g.value_heads) + g.conv * (2 * qk + v) + 4 * v * g.head_dim + h * v;
    }
    if (s.mla) {
      const m = s.mla, key = n * (m.nope_dim + m.rope_dim);
      const q = m.q_rank ? m.q_rank * (h + key + 1) : h * key, kv = m.kv_rank * (h + n * (m.nope_dim + m.v_dim) + 1);
      return q + kv + h * m.rope_dim + n * m.v_dim * h + seqLen * n * (m.nope_dim + m.rope_dim + m.v_dim) / 2;
    }
    const full = s.window_every && (index + 1) % s.window_every === 0, windowed = s.window && !full && seqLen > s.window;
    const keys = windowed ? s.window - s.window * (s.window - 1) / (2 * seqLen) : seqLen / 2;
    return h * (n * d * (s.attention_gate ? 2 : 1) + 2 * s.kv_heads * d) + n * d * h + 2 * n * d * keys;
  }

  // --- the pipeline ----------------------------------------------------------------------------------------------------------------

  function split(layers, pp, vpp) {
    const chunks = pp * vpp;
    if (layers % chunks === 0) return Array(chunks).fill(layers / chunks);
    const least = floorDiv(layers + 2, chunks), more = (layers + 2) % chunks;
    const sizes = range(0, chunks - 1).map((i) => least + (i < more ? 1 : 0));
    sizes[0] -= 1;
    sizes[chunks - 1] -= 1;
    return sizes;
  }

  function indices(sizes, pp, stage) {
    const starts = [0];
    for (const size of sizes) starts.push(starts[starts.length - 1] + size);
    return range(0, sizes.length - 1).filter((i) => i % pp === stage).map((i) => range(starts[i], starts[i] + sizes[i] - 1));
  }

  function inFlight(pp, stage, microbatches, vpp, overlap, sizes) {
    const extra = overlap ? 1 : 0;
    if (vpp === 1) return [Math.min(microbatches, pp - stage + (pp > 1 ? extra : 0))];
    const alive = Math.min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1 + extra), order = [];
    const count = Math.min(microbatches, alive + 2 * pp);
    for (let start = 0; start < count; start += pp)
      for (let chunk = 0; chunk < vpp; chunk += 1) order.push(...Array(Math.min(pp, count - start)).fill(chunk));
    const held = range(0, vpp - 1).map((chunk) => order.slice(0, alive).filter((c) => c === chunk).length);
    return new Set(sizes).size > 1 ? heaviest(held, order, alive, pp * vpp, sizes) : held;
  }

  function heaviest(held, order, alive, turn, sizes) {
    const now = [...held];
    let peak = held, weight = sum(held.map((n, i) => n * sizes[i])), most = weight;
    order.slice(alive, alive + turn).forEach((forth, i) => {
      const back = sizes.length - 1 - order[i];
      now[back] -= 1;
      weight -= sizes[back];
      now[forth] += 1;
      weight += sizes[forth];
      if (weight > most * (1 + 1e-9)) [peak, most] = [[...now], weight];
    });
    return peak;
  }

  const bubble = (p) => (p.pp - 1) / (p.vpp * layout.microbatches(p) + p.pp - 1);

  // --- activations -----------------------------------------------------------------------------------------------------------------

  const tokens = (p) => floorDiv(p.seq_len * p.mbs, p.cp);

  function saved(t, p, index) {
    const s = p.shape, wide = tokens(p), thin = layout.sequenceParallel(p) ? wide / p.tp : wide, eight = p.options.fp8 ? 0.5 : 1;
    const [mixer, ffn] = parts(s, index), row = t.bf16 * thin * s.hidden, found = {};
    if (p.options.backend === "torch" && !p.options.compiled) return eager(t, p, index, wide, thin, eight);
    if (mixer) Object.assign(found, {"attention norm in": row, "attention norm out": row * eight}, mixers[mixer](t, p, wide, thin));
    if (ffn) Object.assign(found, {"mlp norm in": row, "mlp norm out": row * (ffn === "mlp" ? eight : 1)});
    if (ffn) Object.assign(found, ffn === "mlp" ? denseMlp(t, p, wide, eight) : experts(t, p, wide, thin, eight));
    return found;
  }

  // The same of a layer as transformers has it, uncompiled.
  function eager(t, p, index, wide, thin, eight) {
    const s = p.shape, o = p.options, [mixer, ffn] = parts(s, index), autocast = o.sharding === "none", h = s.hidden, found = {};
    const frozen = o.lora > 0 || o.frozen.includes("decoder"), normed = t.fp32 + (frozen ? 0 : autocast ? t.fp32 : t.bf16);
    const beside = pairs(t, s, index, o).map(([name]) => name), norm = thin * (normed * h + t.fp32);
    const inputs = (size, ...products) => {
      const keeping = products.filter((name) => !frozen || beside.includes(name)).length;
      return t.bf16 * (size * (autocast ? keeping : Math.min(1, keeping)) + o.lora * keeping);
    };
    if (mixer) found["attention norm in"] = norm;
    if (mixer === "attention" && !s.mla) {
      const n = s.heads, g = Math.max(s.kv_heads, p.tp), d = s.head_dim, out = inputs(n * d, "o");
      const heads = s.qk_norm ? (n + g) * ((t.fp32 + (frozen ? 0 : t.bf16)) * d + t.fp32) : 0;
      found["attention norm out"] = wide * inputs(h, "q", "k", "v");
      found["q, k, v"] = wide * (t.bf16 * (n + 2 * g) * d + heads) / p.tp;
      found["attention out"] = wide * (n * (t.bf16 * d + t.fp32) + (frozen && (autocast || !out) ? out : out - t.bf16 * n * d)) / p.tp;
    } else if (mixer) Object.assign(found, {"attention norm out": t.bf16 * thin * h}, mixers[mixer](t, p, wide, thin));
    if (ffn) found["mlp norm in"] = norm;
    if (ffn === "mlp") {
      found["mlp norm out"] = wide * inputs(h, ...["up", "gate"].slice(0, up(s)));
      found["mlp fc1 out"] = t.bf16 * wide * (2 * up(s) - 1) * s.ffn / p.tp;
      found["mlp act out"] = wide * inputs(s.ffn, "down") / p.tp;
    } else if (ffn) Object.assign(found, {"mlp norm out": t.bf16 * thin * h}, experts(t, p, wide, thin, eight));
    return found;
  }

  // Bytes of a layer's input, which is kept where all of the layer is computed again.
  function entryBytes(t, p, all) {
    const o = p.options;
    if (o.backend !== "torch" || o.compiled) return Object.values(all)[0];
    return (o.sharding === "none" && !o.lora && !o.frozen.length ? t.fp32 : t.bf16) * tokens(p) / (layout.sequenceParallel(p) ? p.tp : 1) * p.shape.hidden;
  }

  function attention(t, p, wide, thin) {
    const s = p.shape, n = s.heads, g = Math.max(s.kv_heads, p.tp), m = s.mla, d = m ? m.v_dim : s.head_dim, found = {};
    if (m) {
      found["compressed q, k, v"] = t.bf16 * thin * (m.q_rank + m.kv_rank + m.rope_dim);
      found["q, k, v"] = t.bf16 * wide * n * (2 * (m.nope_dim + m.rope_dim) + m.v_dim) / p.tp;
    } else {
      const normed = s.qk_norm ? (n + g) * d : 0, gate = s.attention_gate ? n * d : 0;
      found["q, k, v"] = t.bf16 * wide * ((n + 2 * g) * d + normed + gate) / p.tp;
    }
    const copy = p.options.fp8 ? t.bf16 / 2 : 0;
    return {...found, "attention out": wide * n * ((t.bf16 + copy) * d + t.fp32) / p.tp};
  }

  function linear(t, p, wide) {
    const g = p.shape.linear, qk = g.key_heads * g.head_dim, v = g.value_heads * g.head_dim, one = t.bf16 * wide / p.tp;
    return {
      "linear attention in": one * (2 * qk + 2 * v + 2 * g.value_heads),
      "linear attention q, k, v": one * (2 * qk + v + 2 * v + t.chunk * g.value_heads),
      "linear attention out": one * v, "linear attention norm out": one * v,
    };
  }

  function mamba(t, p, wide) {
    const m = p.shape.mamba, inner = m.heads * m.head_dim, one = t.bf16 * wide / p.tp;
    return {"mamba in": one * (2 * inner + 2 * m.groups * m.state + m.heads), "mamba out": one * inner, "mamba norm out": one * inner};
  }

  const mixers = {attention, linear, mamba};

  const denseMlp = (t, p, wide, eight) => ({
    "mlp fc1 out": t.bf16 * wide * up(p.shape) * p.shape.ffn / p.tp, "mlp act out": t.bf16 * wide * p.shape.ffn * eight / p.tp,
  });

  function experts(t, p, wide, thin, eight) {
    const s = p.shape, rows = thin * s.top_k * p.imbalance, found = {
      "router": 2 * t.fp32 * thin * s.experts,
      "dispatched tokens": t.bf16 * rows * p.etp * width(s) * eight,
      "expert fc1 out": t.bf16 * rows * up(s) * s.expert_ffn,
      "expert act out": t.bf16 * rows * s.expert_ffn * eight,
    };
    if (s.latent) found["latent"] = 2 * t.bf16 * thin * s.latent;
    if (s.shared_ffn) found["shared experts"] = t.bf16 * wide * (up(s) + eight) * s.shared_ffn / p.tp;
    return found;
  }

  function selected(t, p, index) {
    const s = p.shape, [mixer, ffn] = parts(s, index), wide = tokens(p), thin = layout.sequenceParallel(p) ? wide / p.tp : wide;
    const n = s.heads, d = s.head_dim, m = s.mla, one = wide / p.tp, inner = ffn === "mlp" ? s.ffn : s.shared_ffn, outs = [];
    if (mixer && m) {
      outs.push(...(m.q_rank ? [thin * m.q_rank] : []), one * n * (m.nope_dim + m.rope_dim), thin * (m.kv_rank + m.rope_dim));
      outs.push(one * n * (m.nope_dim + m.v_dim), thin * s.hidden);
    } else if (mixer) outs.push(one * n * d, one * s.kv_heads * d, one * s.kv_heads * d, thin * s.hidden);
    if (inner && ffn) outs.push(...Array(up(s)).fill(one * inner), thin * s.hidden);
    const sent = ffn === "experts" && p.ep > 1 ? 2 * thin * s.top_k * p.imbalance * width(s) : 0;
    return (mixer ? one * n * (t.bf16 * (m ? m.v_dim : d) + t.fp32) : 0) + t.bf16 * (sum(outs.filter((_, i) => i % 2 === 0)) + sent);
  }

  // The products of a layer that selective recompute runs again: widths, and which of them TP splits.
  function runAgain(s, mixer, ffn) {
    const h = s.hidden, m = s.mla, n = s.heads, inner = ffn === "mlp" ? s.ffn : s.shared_ffn, found = [];
    if (mixer && m) {
      const queries = n * (m.nope_dim + m.rope_dim);
      found.push(...(m.q_rank ? [[h, m.q_rank, ""], [m.q_rank, queries, "out"]] : [[h, queries, "out"]]));
      found.push([h, m.kv_rank + m.rope_dim, ""], [m.kv_rank, n * (m.nope_dim + m.v_dim), "out"], [n * m.v_dim, h, "in"]);
    } else if (mixer) {
      const q = n * s.head_dim, kv = s.kv_heads * s.head_dim;
      found.push([h, q, "out"], [h, kv, "out"], [h, kv, "out"], [q, h, "in"]);
    }
    if (inner && ffn) found.push(...Array(up(s)).fill([h, inner, "out"]), [inner, h, "in"]);
    return [...(ffn === "experts" ? [[h, s.experts, ""]] : []), ...found.filter((_, i) => i % 2)];
  }

  // What a layer keeps between its passes: on the GPU, in host memory, and what comes back when it is run again.
  function kept(t, p, index) {
    const all = saved(t, p, index), whole = sum(Object.values(all)), entry = entryBytes(t, p, all), o = p.options;
    if (o.recompute.includes("full")) return {stays: entry, sent: 0, again: whole - entry};
    if (o.recompute.includes("selective")) {
      const stays = entry + selected(t, p, index);
      return {stays, sent: 0, again: whole - stays};
    }
    const freed = o.recompute.flatMap((module) => t.freed[module] || []);
    const stay = Object.fromEntries(Object.entries(all).filter(([name]) => !freed.includes(name))), left = sum(Object.values(stay));
    const sent = o.offload ? left * o.offload_percent / 100 : sum(o.offload_modules.map((m) => stay[t.offloaded[m]] || 0));
    return {stays: left - sent, sent, again: whole - left};
  }

  // --- memory ----------------------------------------------------------------------------------------------------------------------

  function weights(t, p, stage, chunks) {
    const s = p.shape, last = stage === p.pp - 1, layers = chunks.flat().map((i) => layer(s, i));
    if (last) layers.push(...Array(s.mtp).fill(null).map(() => mtp(s)));
    const sharded = layers.map((x) => ceilDiv(x.sharded, p.tp)), experts = layers.map((x) => ceilDiv(x.experts, p.ep * p.etp));
    const dense = layers.map((x, i) => sharded[i] + x.repeated);
    const embeds = stage === 0 || (last && s.mtp > 0), closes = s.mtp ? chunks.flat().includes(s.layers - 1) : last;
    const held = s.tied && p.pp === 1 ? 1 : (embeds ? 1 : 0) + (last ? 1 : 0);
    const table = held * ceilDiv(embedding(s), p.tp) + (closes ? normed(s) : 0) + (stage === 0 ? s.positions * s.hidden : 0);
    const tower = stage === 0 ? ceilDiv(vision(s), p.tp) : 0;
    const o = p.options, decoder = sum(dense) + table, frozen = o.frozen.includes("decoder") || o.lora > 0;
    let largest = Math.max(0, ...dense.map((d, i) => d + experts[i]));
    if (o.backend === "torch") largest = Math.max(largest, held * ceilDiv(embedding(s), p.tp));
    return {
      dense: decoder + tower, experts: sum(experts), linear: sum(sharded) + sum(experts), largest,
      frozen_dense: (frozen ? decoder : 0) + (o.frozen.includes("vision") || o.lora > 0 ? tower : 0), frozen_experts: frozen ? sum(experts) : 0,
      adapters: o.lora ? sum(chunks.flat().map((i) => adapters(t, s, i, o))) : 0,
    };
  }

  const ownMaster = (t, o) => o.backend === "torch" && !t.deepspeed.includes(o.sharding);

  function states(t, p, held) {
    const o = p.options, own = ownMaster(t, o), [, splitGradients, splitParameters] = t.sharded[o.sharding], kinds = ["dense", "experts"];
    const over = {dense: layout.dp(p) * p.cp, experts: layout.edp(p)}, one = {dense: 1, experts: 1};
    const instances = o.sharding === "fsdp2" && o.backend !== "torch" ? 1 : o.optimizer_instances;
    const shards = o.sharding === "none" ? one : Object.fromEntries(kinds.map((k) => [k, Math.max(1, floorDiv(over[k], instances))]));
    const frozen = {dense: held.frozen_dense, experts: held.frozen_experts}, master = p.master_bytes;
    const trained = {dense: held.dense + held.adapters - held.frozen_dense, experts: held.experts - held.frozen_experts};
    const each = (counts, divided) => sum(kinds.map((k) => counts[k] / divided[k])), stored = own || splitParameters ? shards : one;
    const size = own ? master : t.param_bytes;
    let parameters = size * each(trained, stored) + (o.lora ? t.param_bytes : size) * each(frozen, stored);
    if (o.base) parameters -= (t.param_bytes - t.base_bytes[o.base]) * each({dense: held.linear - held.experts, experts: held.experts}, stored);
    return {
      parameters, gradients: p.grad_bytes * each(trained, (own || splitGradients) && !(own && p.pp > 1) ? shards : one),
      optimizer: ((own ? 0 : master) + 2 * p.moment_bytes) * each(trained, shards),
    };
  }

  // Bytes that leave the GPU where a share of the optimizer is on the host, and what they take there.
  function onHost(t, p, state) {
    const o = p.options, share = o.optimizer_offload / 100, each = p.master_bytes + 2 * p.moment_bytes, there = t.host_bytes * state.optimizer / each;
    if (o.backend !== "torch")
      return {parameters: 0, gradients: 0, optimizer: state.optimizer * share * (o.precision_aware ? each : 2 * p.moment_bytes) / each, host: there * share};
    const own = ownMaster(t, o), parameters = own ? state.parameters : 0, gradients = own || t.sharded[o.sharding][1] ? state.gradients : 0;
    return {
      parameters: share * parameters, gradients: share * gradients, optimizer: share * state.optimizer,
      host: share * (own ? parameters + gradients + state.optimizer : there),
    };
  }

  function gatheredBytes(t, p, held) {
    const o = p.options;
    if (o.sharding === "zero3" && o.backend === "torch") return t.param_bytes * Math.min(t.live_parameters, held.dense + held.experts);
    if (ownMaster(t, o) && !(o.compiled || o.lora || o.sharding !== "none")) return t.param_bytes * (held.linear + embedding(p.shape) / p.tp);
    if (ownMaster(t, o) && (o.sharding === "optimizer" || (p.pp > 1 && o.sharding === "fsdp2"))) return t.param_bytes * (held.dense + held.experts);
    return ["fsdp", "fsdp2"].includes(o.sharding) ? 2 * t.param_bytes * held.largest : 0;
  }

  function stageOf(t, p, stage, chunks) {
    const held = weights(t, p, stage, chunks), last = stage === p.pp - 1;
    const depths = chunks.map((c, i) => i === chunks.length - 1 && last ? [...c, ...Array(p.shape.mtp).fill(p.shape.layers)] : c);
    const chunked = depths.map((chunk) => chunk.map((index) => kept(t, p, index))), all = chunked.flat();
    const sizes = chunked.map((chunk) => sum(chunk.map((x) => x.stays)));
    const alive = inFlight(p.pp, stage, layout.microbatches(p), p.vpp, p.options.ep_overlap, sizes);
    const over = (field) => sum(alive.map((n, i) => n * sum(chunked[i].map((x) => x[field]))));
    const away = over("sent"), most = Math.max(0, ...all.map((x) => x.sent)), resident = Math.min(away, t.resident_layers * most);
    const o = p.options, gathered = gatheredBytes(t, p, held);
    const state = states(t, p, held), each = o.backend === "torch" ? p.master_bytes : t.param_bytes;
    const copies = o.fp8 ? t.fp8_copies[o.fp8] * held.linear * state.parameters / (each * Math.max(1, held.dense + held.experts)) : 0;
    if (o.fp8_params) state.parameters -= t.param_bytes * copies / Math.max(t.fp8_copies[o.fp8], 1);
    const left = onHost(t, p, state);
    for (const key of ["parameters", "gradients", "optimizer"]) state[key] -= left[key];
    const alone = o.backend === "torch" && !o.compiled && o.sharding === "none";
    const found = {
      stage: stage + 1, layers: chunks.flat().length, in_flight: alive, ...state,
      fp8_weights: copies, gathered, activations: over("stays") + resident,
      loss: last ? (t.losses[p.loss] + (p.loss === "torch" && p.tp > 1 ? t.fp32 : 0)) * (1 + p.shape.mtp) * tokens(p) * p.shape.vocab / p.tp : 0,
      replayed: Math.min(away - resident, t.returning_layers * most) + Math.max(0, ...all.map((x) => x.again)), workspace: alone ? t.plain_bytes : t.workspace_bytes, grown: alone && layout.microbatches(p) === 1 ? state.gradients : 0,
      update: ["zero1", "zero2"].includes(o.sharding) && !left.optimizer ? (t.param_bytes + t.fp32) * state.optimizer / (p.master_bytes + 2 * p.moment_bytes) : 0,
      host: away - resident + left.host,
    };
    found.transient = Math.max(found.loss, found.replayed);
    found.states = found.parameters + found.gradients + found.optimizer + found.fp8_weights;
    found.peak = found.states - found.grown + Math.max(found.grown + found.update, found.gathered + found.activations + found.transient) + found.workspace;
    return found;
  }

  // The breakdown of each pipeline stage, in bytes on each of its ranks.
  function estimate(tables, p) {
    const sizes = split(p.shape.layers, p.pp, p.vpp);
    return range(0, p.pp - 1).map((stage) => stageOf(tables, p, stage, indices(sizes, p.pp, stage)));
  }

  return {estimate, flopsPerToken, weightFlops, bubble, total, active, vision, parts, layer, adapters, pairs, split, indices, kept, runAgain, ownMaster};
})(PlaybookLayout);
