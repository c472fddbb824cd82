// Seconds of a training step, in the browser: a port of playbook/planner/time (layer.py, collectives.py, step.py, spread.py), which names the source of
// each law. Constants and laws come from tables that Python writes, under Python's names; tests/site compares the figures with Python's.
var PlaybookTime = (function (layout, memory) {
  "use strict";

  const {floorDiv, range} = layout, BF16 = 2, FP32 = 4;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const hypot = (...values) => Math.sqrt(sum(values.map((v) => v * v)));

  // --- seconds of one pass by part; communication is what is exposed ------------------------------------------------------------------

  const PARTS = ["products", "grouped", "attention", "elementwise", "host", "tp", "ep", "cp"];
  const pass = (given) => Object.fromEntries(PARTS.map((k) => [k, (given || {})[k] || 0]));
  const plus = (a, b, times = 1) => Object.fromEntries(PARTS.map((k) => [k, a[k] + times * b[k]]));
  const seconds = (p) => sum(PARTS.map((k) => p[k]));
  const both = (a, b) => ({forward: plus(a.forward, b.forward), backward: plus(a.backward, b.backward)});
  const cost = (forward, backward) => ({forward: pass(forward), backward: pass(backward)});
  const together = (costs) => costs.reduce(both, cost());
  const more = (p, given) => plus(p, pass(given));

  // --- collectives.py -----------------------------------------------------------------------------------------------------------------

  function inside(g, degree, stride) {
    let fits = Math.max(1, Math.min(degree, floorDiv(g.domain, Math.max(stride, 1))));
    while (degree % fits) fits -= 1;
    return fits;
  }

  function ring(t, g, degree, stride, bytes, pieces = 1) {
    if (degree <= 1) return 0;
    const c = t.constants, near = inside(g, degree, stride);
    let starts = near > 1 ? c.LINK_START * Math.ceil(Math.log2(near)) : 0, rate = c.LINK_RING * g.link_bytes_per_s;
    if (near === degree && g.rings[degree]) [starts, rate] = g.rings[degree];
    if (near < degree) {
      rate = Math.min(rate, c.NIC_RING * g.nic_bytes_per_s * near);
      starts += c.NIC_START * Math.ceil(Math.log2(degree / near));
    }
    return pieces * starts + bytes * (degree - 1) / degree / rate;
  }

  function allToAll(t, g, degree, stride, bytes) {
    if (degree <= 1) return 0;
    const c = t.constants, near = inside(g, degree, stride), link = bytes * (near - 1) / degree / (c.LINK_ALL_TO_ALL * g.link_bytes_per_s);
    if (near === degree) return c.LINK_START + link;
    return c.NIC_START + Math.max(link, bytes * (degree - near) / degree / (c.NIC_ALL_TO_ALL * g.nic_bytes_per_s));
  }

  const distinct = (groups, topK) => groups * (1 - (1 - 1 / groups) ** topK);

  function dispatchOnce(t, g, degree, stride, tokenBytes, topK) {
    if (degree <= 1) return 0;
    const c = t.constants, near = inside(g, degree, stride), domains = floorDiv(degree, near);
    const link = tokenBytes * (distinct(degree, topK) * (near - 1) / near) / (c.LINK_DISPATCH * g.link_bytes_per_s);
    if (domains === 1) return c.LINK_START + link;
    return c.NIC_START + Math.max(link, tokenBytes * distinct(domains, topK) * (domains - 1) / domains / (c.NIC_DISPATCH * g.nic_bytes_per_s));
  }

  function send(t, g, stride, bytes) {
    const c = t.constants;
    return stride < g.domain ? c.LINK_START + bytes / (c.LINK_RING * g.link_bytes_per_s) : c.NIC_START + bytes / (c.NIC_RING * g.nic_bytes_per_s);
  }

  // --- layer.py: what decides a layer's time beside its kind ------------------------------------------------------------------------------

  function searched(t, p) {
    const s = p.shape;
    if (!s.experts || p.options.fp8 || p.imbalance === 1) return 0;
    const experts = s.experts / p.ep, tokens = p.mbs * p.seq_len / p.cp / (layout.sequenceParallel(p) ? p.tp : 1);
    const rows = tokens * s.top_k * p.imbalance * p.etp / experts;
    const products = (s.layers - s.dense_layers) / p.pp * layout.microbatches(p) * experts;
    return 1 / (1 + products / (rows * t.constants.SIZES_REMEMBERED));
  }

  function work(t, p) {
    const o = p.options, torch = o.backend === "torch" || o.sharding === "fsdp2", sp = layout.sequenceParallel(p);
    const rows = p.seq_len * p.mbs / p.cp;
    return {
      tp: p.tp, cp: p.cp, ep: p.ep, etp: p.etp, seq_len: p.seq_len, sp, imbalance: p.imbalance, searched: torch ? 0 : searched(t, p),
      dispatcher: o.dispatcher || "alltoall", cp_comm: o.cp_comm || "p2p", fp8: o.fp8, recompute: o.recompute, graphs: o.graphs, ep_overlap: o.ep_overlap,
      torch, sharded: o.sharding !== "none", attention: o.attention || (torch ? "flash2" : "cudnn"),
      frozen: o.lora > 0 || o.frozen.includes("decoder"), native_loss: p.loss === "native", capacity: o.capacity,
      options: {backend: torch ? "torch" : "megatron", lora: o.lora, lora_targets: o.lora_targets, base: o.base},
      weight_grad: torch ? BF16 : 2 * p.grad_bytes, compiled: !torch || o.compiled, apart: o.cp_comm === "a2a" ? p.cp : o.cp_comm === "a2a+p2p" && o.cp_sizes.length ? o.cp_sizes[0] : 1,
      rows, local: rows / (sp ? p.tp : 1),
    };
  }

  function kind(s, index) {
    const [mixer, ffn] = memory.parts(s, index), full = s.window_every && (index + 1) % s.window_every === 0;
    return {mixer, ffn, windowed: Boolean(s.window) && !full};
  }

  const bytes = (g, n) => n / (g.laws.memory_share * g.memory_bytes_per_s);
  const product = (law, flops, n, peak, bandwidth) => law.fixed + Math.max(flops / (law.share * peak), n / (law.memory_share * bandwidth));
  const up = (s) => s.gated ? 2 : 1, expertHidden = (s) => s.latent || s.hidden;

  function dense(t, g, rows, wideIn, wideOut, w, wide = false) {
    const flops = 2 * rows * wideIn * wideOut, weight = wideIn * wideOut, sides = BF16 * rows * (wideIn + wideOut), laws = g.laws, fp8 = wide ? "" : w.fp8;
    const one = (law, read, written = 0) =>
      product(fp8 ? laws.fp8 : law, flops, (fp8 ? read / 2 : read) + written, fp8 ? g.fp8_flops_per_s : g.bf16_flops_per_s, g.memory_bytes_per_s) / t.constants.IN_STEP;
    const found = cost(
      {products: one(laws.forward, sides + BF16 * weight)},
      {products: one(laws.input_gradient, sides + BF16 * weight) + one(laws.weight_gradient, sides, w.weight_grad * weight)},
    );
    return fp8 ? cast(t, g, found, fp8, rows, wideIn, wideOut) : found;
  }

  function cast(t, g, found, fp8, values, wideIn, wideOut) {
    const [into, outOf] = t.layer._CASTS[fp8] || t.layer._SCALED_CASTS;
    return both(found, cost({elementwise: bytes(g, into * values * wideIn)}, {elementwise: bytes(g, outOf * values * wideOut)}));
  }

  function grouped(t, g, rows, experts, wideIn, wideOut, w) {
    const tile = t.tile, padded = rows < 8 * tile ? Math.max(tile, Math.ceil(rows / tile) * tile) : rows, laws = g.laws, fp8 = w.fp8;
    const flops = 2 * padded * experts * wideIn * wideOut, weight = experts * wideIn * wideOut, sides = BF16 * experts * rows * (wideIn + wideOut);
    const fast = fp8 ? g.fp8_flops_per_s / g.bf16_flops_per_s * laws.fp8.share / laws.forward.share : 1;
    const [first, second] = laws.grouped[w.torch ? "torch" : "megatron"];
    const one = (law, read, written = 0) =>
      product(law, flops / fast, read * (fp8 ? 0.5 : 1) + written, g.bf16_flops_per_s, g.memory_bytes_per_s) / t.constants.IN_STEP;
    const found = cost({grouped: one(first, sides + BF16 * weight)}, {grouped: one(second, sides + BF16 * weight) + one(second, sides, w.weight_grad * weight)});
    return fp8 ? cast(t, g, found, fp8, rows * experts, wideIn, wideOut) : found;
  }

  // The products around one layer's attention on a TP rank: what recomputes them, width in, width out.
  function projections(s, mixer, tp) {
    const h = s.hidden, n = s.heads / tp, d = s.head_dim, m = s.mla;
    if (mixer === "mamba" && s.mamba) {
      const x = s.mamba, inner = x.heads * x.head_dim;
      return [["", h, (2 * inner + 2 * x.groups * x.state + x.heads) / tp], ["", inner / tp, h]];
    }
    if (mixer === "linear" && s.linear) {
      const x = s.linear, qk = x.key_heads * x.head_dim, v = x.value_heads * x.head_dim;
      return [["", h, (2 * qk + 2 * v + 2 * x.value_heads) / tp], ["", v / tp, h]];
    }
    if (m) {
      const wide = n * (m.nope_dim + m.rope_dim), query = m.q_rank ? [["", h, m.q_rank], ["mla_up_proj", m.q_rank, wide]] : [["", h, wide]];
      return [...query, ["", h, m.kv_rank + m.rope_dim], ["mla_up_proj", m.kv_rank, n * (m.nope_dim + m.v_dim)], ["", n * m.v_dim, h]];
    }
    return [["", h, (n * (s.attention_gate ? 2 : 1) + 2 * Math.max(s.kv_heads / tp, 1)) * d], ["", n * d, h]];
  }

  const multiplied = (t, g, w, widths) => together(widths.map(([, wideIn, wideOut]) => dense(t, g, w.rows, wideIn, wideOut, w)));

  function turned(s, k, w) {
    const m = s.mla;
    if (m && k.mixer === "attention") return s.heads / w.tp * (2 * m.nope_dim + m.rope_dim + 2 * m.v_dim) / 2 + m.q_rank + m.kv_rank;
    return sum(projections(s, k.mixer, w.tp).slice(0, -1).map(([, , wideOut]) => wideOut)) * (s.qk_norm ? 2 : 1);
  }

  function scan(t, g, rows, wide, states) {
    const moved = bytes(g, t.layer._SCAN_PASSES * BF16 * rows * wide), products = 2 * 4 * rows * states / t.constants.SCAN_RATE;
    return [moved + products, 2 * (moved + products)];
  }

  function attentionShare(laws, kernel, headDim, phase, length) {
    const [lengths, shares] = laws.attention[`${kernel} ${headDim <= 96 ? 64 : 128} ${phase}`], x = Math.log(Math.max(length, 1));
    let i = 0;
    while (i < lengths.length && lengths[i] <= x) i += 1;
    if (i === 0) return shares[0] * Math.sqrt(length / Math.exp(lengths[0]));
    if (i === lengths.length) return shares[i - 1];
    return shares[i - 1] + (x - lengths[i - 1]) / (lengths[i] - lengths[i - 1]) * (shares[i] - shares[i - 1]);
  }

  // Attention itself, both passes.
  function core(t, g, s, k, w) {
    const laws = g.laws, peak = g.bf16_flops_per_s, m = s.mla;
    if (k.mixer === "mamba" && s.mamba) return scan(t, g, w.rows / w.tp, s.mamba.heads * s.mamba.head_dim, s.mamba.heads * s.mamba.head_dim * s.mamba.state);
    if (k.mixer === "linear" && s.linear) {
      const x = s.linear;
      return scan(t, g, w.rows / w.tp, (x.value_heads + x.key_heads) * x.head_dim, x.value_heads * x.head_dim ** 2);
    }
    const context = k.windowed && w.seq_len > s.window ? s.window - s.window * (s.window - 1) / (2 * w.seq_len) : w.seq_len / 2;
    const wide = m ? m.nope_dim + m.rope_dim + m.v_dim : 2 * s.head_dim, flops = 2 * w.rows * s.heads * wide * context / w.tp;
    const length = 2 * context / (k.windowed ? 1 : w.cp), slower = (w.attention === "flash1" ? t.constants.FLASH_1 : 1) / t.constants.IN_STEP;
    if (w.attention === "unfused") {
      const scores = w.rows * s.heads / w.tp * (w.seq_len / w.cp), products = 2 * flops / (t.layer._NARROW * laws.forward.share * peak);
      return [products + bytes(g, t.layer._SCORES_FORWARD * scores), 2 * products + bytes(g, t.layer._SCORES_BACKWARD * scores)];
    }
    const kernel = w.attention !== "cudnn" && g.has_fp8 ? "flash" : "cudnn";
    return [["forward", 1], ["backward", 2.5]].map(([phase, times]) =>
      laws.attention_fixed + slower * times * flops / (attentionShare(laws, kernel, s.head_dim, phase, length) * peak));
  }

  const tensor = (t, g, s, w) => ring(t, g, w.tp, 1, BF16 * w.rows * s.hidden);

  function gathersBack(w, gather, first) {
    if (!w.sp) return 2 * gather;
    return w.torch ? 3 * gather : gather + Math.max(0, 2 * gather - first.backward.products);
  }

  // All heads in an all-to-all, and keys and values over the rest of CP, in the forward pass.
  function context(t, g, s, k, w) {
    if (w.cp === 1) return [0, 0];
    const m = s.mla, keys = m ? s.heads * (m.nope_dim + m.rope_dim + m.v_dim) / w.tp : 2 * Math.max(s.kv_heads, w.tp * w.apart) * s.head_dim / w.tp;
    const queries = m ? keys : 2 * s.heads * s.head_dim / w.tp, apart = k.mixer === "attention" ? w.apart : w.cp, around = floorDiv(w.cp, apart);
    return [
      apart > 1 ? allToAll(t, g, apart, w.tp, BF16 * w.rows * (keys + queries)) : 0,
      around > 1 ? ring(t, g, around, w.tp * apart, BF16 * w.rows * keys * around) : 0,
    ];
  }

  function attention(t, g, s, k, w) {
    const widths = projections(s, k.mixer, w.tp), products = multiplied(t, g, w, widths), first = multiplied(t, g, w, widths.slice(0, -1));
    const [there, back] = core(t, g, s, k, w), m = t.layer, compressed = s.mla && k.mixer === "attention" ? t.constants.HOST_MLA : 1;
    const [hostThere, hostBack] = t.constants.HOST_ATTENTION.map((x) => compressed * x / g.host_speed);
    const moved = BF16 * (m._NORM_PASSES * w.local * s.hidden + 2 * w.rows * turned(s, k, w)), gather = tensor(t, g, s, w);
    const [exchanged, around] = context(t, g, s, k, w), exposed = (sent, beside) => w.cp_comm.endsWith("p2p") ? Math.max(0, sent - beside) : sent;
    return both(products, cost(
      {attention: there, elementwise: bytes(g, moved), host: hostThere, tp: 2 * gather, cp: exchanged + exposed(around, there)},
      {attention: back, elementwise: bytes(g, m._BACKWARD_NORM * moved), host: hostBack, tp: gathersBack(w, gather, first), cp: 2 * exchanged + exposed(2 * around, back)},
    ));
  }

  function swiglu(t, g, s, wide, w) {
    const act = bytes(g, BF16 * w.rows * wide * (up(s) + 1)), products = multiplied(t, g, w, [["", s.hidden, up(s) * wide], ["", wide, s.hidden]]);
    return both(products, cost({elementwise: act}, {elementwise: act * (2 * up(s) + 1) / (up(s) + 1)}));
  }

  function mlp(t, g, s, w) {
    const moved = BF16 * t.layer._NORM_PASSES * w.local * s.hidden, gather = tensor(t, g, s, w), host = t.constants.HOST_MLP.map((x) => x / g.host_speed);
    const first = dense(t, g, w.rows, s.hidden, up(s) * s.ffn / w.tp, w);
    return both(swiglu(t, g, s, s.ffn / w.tp, w), cost(
      {elementwise: bytes(g, moved), host: host[0], tp: 2 * gather},
      {elementwise: bytes(g, t.layer._BACKWARD_NORM * moved), host: host[1], tp: gathersBack(w, gather, first)},
    ));
  }

  function dispatch(t, g, s, w) {
    const tokenBytes = BF16 * w.local * expertHidden(s), copies = tokenBytes * s.top_k * w.imbalance;
    if (w.dispatcher === "allgather") return ring(t, g, w.ep * w.etp, 1, tokenBytes * w.ep * w.etp);
    const inner = ring(t, g, w.etp, 1, copies * w.etp);
    if (t.flex.includes(w.dispatcher)) return inner + dispatchOnce(t, g, w.ep, w.etp, tokenBytes * w.imbalance, s.top_k);
    return inner + allToAll(t, g, w.ep, w.etp, copies);
  }

  function moe(t, g, s, w) {
    const c = t.constants, m = t.layer, h = s.hidden, copies = w.local * s.top_k * w.imbalance, mine = s.experts / w.ep, wide = expertHidden(s);
    const each = copies * w.etp / mine, inner = s.expert_ffn / w.etp;
    const products = [grouped(t, g, each, mine, wide, up(s) * inner, w), grouped(t, g, each, mine, inner, wide, w), dense(t, g, w.local, h, s.experts, w, true)];
    if (s.latent) products.push(dense(t, g, w.local, h, wide, w), dense(t, g, w.local, wide, h, w));
    if (s.shared_ffn) products.push(swiglu(t, g, s, s.shared_ffn / w.tp, w));
    const passes = s.expert_bias && w.fp8 !== "mxfp8" ? m._BIASED_GLU : up(s) + 1, act = BF16 * copies * w.etp * inner * passes;
    const once = t.flex.includes(w.dispatcher) || (w.torch && w.ep * w.etp === 1), permuted = BF16 * wide * copies * 2 * (once ? w.etp : 1 + w.etp);
    const norm = BF16 * m._NORM_PASSES * w.local * h + 3 * FP32 * w.local * s.experts;
    const sent = 2 * dispatch(t, g, s, w) * (w.ep_overlap ? 1 - c.EP_HIDDEN : 1), shared = s.shared_ffn ? 2 * tensor(t, g, s, w) : 0;
    const launched = w.torch ? Math.min(mine, w.sharded ? m._TORCH_EXPERTS : 1) : mine;
    const host = [0, 1].map((i) =>
      (c.HOST_MOE[i] + launched * (c.HOST_EXPERT[i] + w.searched * c.HOST_SEARCH[i]) + (s.shared_ffn ? c.HOST_MLP[i] : 0)) / g.host_speed);
    return both(together(products), cost(
      {elementwise: bytes(g, act + 2 * permuted + norm), ep: sent, tp: shared, host: host[0]},
      {elementwise: bytes(g, act * (2 * up(s) + 1) / (up(s) + 1) + 2 * permuted + m._BACKWARD_NORM * norm), ep: sent, tp: m._BACKWARD_TP * shared, host: host[1]},
    ));
  }

  // What recompute runs once more in the backward pass.
  function again(t, g, s, k, w, blocks) {
    const names = w.recompute, whole = plus(blocks[0].forward, blocks[1].forward);
    if (!names.length) return pass();
    if (names.includes("selective")) {
      const products = multiplied(t, g, w, memory.runAgain(s, k.mixer, k.ffn).map(([wideIn, wideOut, split]) =>
        ["", split === "in" ? wideIn / w.tp : wideIn, split === "out" ? wideOut / w.tp : wideOut])).forward.products;
      return {...whole, products, attention: 0, tp: whole.tp / 2, ep: 0, cp: 0};
    }
    if (names.includes("full")) return whole;
    let found = pass();
    if (names.includes("core_attn")) found = more(found, {attention: blocks[0].forward.attention, cp: blocks[0].forward.cp});
    if (names.includes("mla_up_proj")) found = plus(found, multiplied(t, g, w, projections(s, k.mixer, w.tp).filter(([name]) => name === "mla_up_proj")).forward);
    if (names.includes("layernorm")) found = more(found, {elementwise: bytes(g, 2 * 2 * BF16 * w.local * s.hidden)});
    if (k.ffn !== "experts") return names.includes("mlp") ? plus(found, blocks[1].forward) : found;
    if (names.includes("moe")) return plus(found, blocks[1].forward);
    if (names.includes("moe_act")) found = more(found, {elementwise: bytes(g, BF16 * w.local * s.top_k * s.expert_ffn * (up(s) + 1))});
    if (names.includes("shared_experts") && s.shared_ffn) found = plus(found, swiglu(t, g, s, s.shared_ffn / w.tp, w).forward);
    return found;
  }

  // What adapters beside a layer's products move, and a 4-bit base that is made bf16 for each.
  function beside(t, g, s, index, w) {
    const o = w.options, pairs = memory.pairs(t, s, index, o).map(([name, wideIn, wideOut]) =>
      [BF16 * (name === "experts" && s.top_k > 1 ? w.local * s.top_k : w.rows / w.tp), wideIn, wideOut]);
    const held = memory.layer(s, index), unpacked = o.base ? (held.sharded / w.tp + held.experts / (w.ep * w.etp)) * (t.base_bytes[o.base] + BF16) : 0;
    const moved = (a, b) => bytes(g, sum(pairs.map(([each, wideIn, wideOut]) => each * (a * wideIn + b * wideOut))) + unpacked);
    return cost({elementwise: moved(1, 3)}, {elementwise: moved(3, 2)});
  }

  function uncompiled(t, s, k, w) {
    const m = t.layer, heads = (s.heads + s.kv_heads) * s.head_dim / w.tp, halves = (k.mixer ? 1 : 0) + (k.ffn ? 1 : 0);
    return m._NORM * w.local * s.hidden * halves + (k.mixer === "attention" ? (m._TURN + (s.qk_norm ? m._NORM : 0)) * w.rows * heads : 0) +
      (k.ffn === "mlp" ? m._GATE * w.rows * s.ffn / w.tp : 0);
  }

  function waited(t, p, w, routed) {
    if (w.graphs.includes("full_iteration")) return {...p, host: 0};
    const c = t.constants, device = seconds(p) - p.host;
    const host = p.host * (w.graphs.length ? c.HOST_GRAPHED : 1) * (w.torch ? c.HOST_TORCH : 1) * (w.fp8 === "blockwise" ? c.HOST_FP8 : 1);
    return {...p, host: (routed ? hypot(device, host) : Math.max(device, host)) - device};
  }

  // Seconds of one layer for one micro-batch.
  function layer(t, g, s, index, w) {
    const k = kind(s, index), blocks = [
      k.mixer ? attention(t, g, s, k, w) : cost(),
      k.ffn === "experts" ? moe(t, g, s, w) : k.ffn ? mlp(t, g, s, w) : cost(),
    ];
    let {forward, backward} = both(blocks[0], blocks[1]);
    if (!w.compiled) {
      const extra = pass({elementwise: bytes(g, uncompiled(t, s, k, w))});
      [forward, backward] = [plus(forward, extra), plus(backward, extra, 2)];
      blocks[0] = {...blocks[0], forward: plus(blocks[0].forward, extra)};
    }
    if (w.frozen) backward = {...backward, products: backward.products / 2, grouped: backward.grouped / 2};
    if (w.options.lora) {
      const adapters = beside(t, g, s, index, w);
      [forward, backward] = [plus(forward, adapters.forward), plus(backward, adapters.backward)];
      blocks[1] = {...blocks[1], forward: plus(blocks[1].forward, adapters.forward)};
    }
    const routed = k.ffn === "experts" && !w.capacity;
    return {forward: waited(t, forward, w, routed), backward: waited(t, plus(backward, again(t, g, s, k, w, blocks)), w, routed)};
  }

  // --- step.py -------------------------------------------------------------------------------------------------------------------------

  // Output layer, loss and their gradients; and one of its three products alone.
  function head(t, g, s, w) {
    const flops = 6 * w.rows * s.hidden * (s.vocab / w.tp * (1 + s.mtp) + 2 * s.hidden / w.tp * s.mtp);
    const moved = w.native_loss ? t.step._LOGIT_BYTES * w.rows * s.vocab / w.tp : 0, fused = flops / (g.laws.loss_share * g.bf16_flops_per_s * t.constants.IN_STEP);
    return [fused + bytes(g, moved), fused / 3];
  }

  function stageOf(t, g, p, w, indices, first, last, layers) {
    const s = p.shape, placed = last ? [...indices, ...Array(s.mtp).fill(s.layers)] : indices, table = s.vocab * s.hidden / w.tp;
    let forward = pass(), backward = pass(), denseCount = 0, experts = 0, adapters = 0;
    for (const index of placed) {
      const one = layers(index), held = memory.layer(s, index);
      [forward, backward] = [plus(forward, one.forward), plus(backward, one.backward)];
      denseCount += held.sharded / w.tp + held.repeated;
      experts += held.experts / (w.ep * w.etp);
      adapters += w.options.lora ? memory.adapters(t, s, index, w.options) : 0;
    }
    if (first) {
      const lookup = bytes(g, 2 * BF16 * w.rows * s.hidden), moved = BF16 + (w.torch ? 0 : BF16 + 2 * FP32);
      denseCount += table;
      forward = more(forward, {elementwise: lookup});
      backward = more(backward, {elementwise: 2 * lookup + (w.frozen ? 0 : bytes(g, moved * table))});
    }
    if (last) {
      const [one, third] = head(t, g, s, w);
      denseCount += s.tied && first ? 0 : table;
      forward = more(forward, {products: one / 3});
      backward = more(backward, {products: 2 * one / 3 - (w.frozen ? third : 0)});
    }
    return {forward, backward, dense: denseCount, experts, trained: w.frozen ? [adapters, 0] : [denseCount, experts]};
  }

  const lasts = (stage) => seconds(stage.forward) + seconds(stage.backward);
  const most = (items, of) => items.reduce((a, b) => of(b) > of(a) ? b : a);

  // The stage that the others wait for; an uneven pipeline is listed so that stages are equal but for half a layer.
  function slowest(p, stages) {
    const slow = most(stages, lasts);
    if (p.pp === 1 || p.shape.layers % (p.pp * p.vpp) === 0) return slow;
    const all = sum(stages.map(lasts)), mean = all / p.pp, share = Math.min(1, (mean + mean * p.pp / p.shape.layers / 2) / lasts(slow));
    const scale = share * lasts(slow) / all, of = (side) => plus(pass(), stages.map((x) => x[side]).reduce((a, b) => plus(a, b)), scale);
    return {...slow, forward: of("forward"), backward: of("backward")};
  }

  function between(t, g, p, stages, slow) {
    if (p.pp === 1) return {};
    const s = p.shape, tokens = p.mbs * p.seq_len / p.cp / (layout.sequenceParallel(p) ? p.tp : 1), m = layout.microbatches(p), a = floorDiv(p.gpus, p.pp);
    const one = send(t, g, p.gpus - a, BF16 * tokens * s.hidden), hidden = p.vpp > 1 && p.options.overlap_p2p;
    const sends = 2 * one * (hidden ? p.pp - 1 : m * p.vpp + p.pp - 1) + (hidden ? m * Math.max(0, p.vpp * one - lasts(slow)) : 0);
    const table = s.tied ? p.grad_bytes * s.vocab * s.hidden / p.tp : 0;
    return {
      pp: sends + (table ? 2 * ring(t, g, 2, a * (p.pp - 1), table) : 0),
      bubble: Math.max(0, sum(stages.map(lasts)) - lasts(slow)) / p.vpp,
    };
  }

  function offloaded(t, g, p, slow, firstStage) {
    const o = p.options;
    if (!(o.offload || o.offload_modules.length)) return {};
    const sent = sum(firstStage.map((index) => memory.kept(t, p, index).sent)) / g.laws.host_to_device;
    return {offload: layout.microbatches(p) * (Math.max(0, sent - seconds(slow.forward)) + Math.max(0, sent - seconds(slow.backward)))};
  }

  const grids = (p) => [[layout.dp(p) * p.cp, p.tp], [layout.edp(p), p.etp * p.ep]];
  const instances = (t, p) => t.sharded[p.options.sharding][0] ? p.options.optimizer_instances : 1;

  function rings(t, g, p, counts, each, pieces) {
    const [[denseRanks, inner], [experts, outer]] = grids(p), copies = instances(t, p);
    return ring(t, g, floorDiv(denseRanks, copies), inner, each * counts[0], pieces) + ring(t, g, Math.max(1, floorDiv(experts, copies)), outer, each * counts[1], pieces);
  }

  function copiesBetween(t, g, p, counts) {
    const copies = instances(t, p);
    if (copies === 1) return 0;
    return 2 * sum(grids(p).map(([ranks, apart], i) => {
      const shared = Math.max(1, floorDiv(ranks, copies));
      return ring(t, g, copies, apart * shared, p.grad_bytes * counts[i] / shared);
    }));
  }

  function dataParallel(t, g, p, stage) {
    if (layout.dp(p) * p.cp * layout.edp(p) === 1) return {};
    const forward = seconds(stage.forward), backward = seconds(stage.backward), o = p.options, layers = Math.max(1, floorDiv(p.shape.layers, p.pp));
    const [splitOptimizer, splitGradients, splitParameters] = t.sharded[o.sharding], m = layout.microbatches(p);
    const hidden = (sent, computed) => Math.max(sent - t.constants.DP_OVERLAP * computed, 0.05 * sent);
    const scatter = rings(t, g, p, stage.trained, p.grad_bytes, splitParameters ? layers : 1), last = copiesBetween(t, g, p, stage.trained);
    if (splitParameters) {
      const gather = rings(t, g, p, [stage.dense, stage.experts], BF16, layers), exposed = hidden(gather, forward) + hidden(gather + scatter, backward);
      return {dp: m * (exposed + (2 * gather + scatter) / layers) + hidden(gather + scatter + last, backward) - hidden(gather + scatter, backward)};
    }
    if (!splitOptimizer) return {dp: hidden(2 * scatter, backward)};
    const gather = rings(t, g, p, stage.trained, BF16, 1), before = splitGradients ? m - 1 : 0;
    const gathered = o.backend === "torch" && t.deepspeed.includes(o.sharding) ? gather : hidden(gather, forward);
    return {dp: before * hidden(scatter, backward) + hidden(scatter + last, backward) + gathered};
  }

  function optimizer(t, g, p, stage) {
    const o = p.options, [splitOptimizer, , splitParameters] = t.sharded[o.sharding], c = t.constants, copies = instances(t, p);
    const over = splitOptimizer ? grids(p).map(([ranks]) => Math.max(floorDiv(ranks, copies), 1)) : [1, 1], [trainedDense, trainedExperts] = stage.trained;
    const count = trainedDense / over[0] + trainedExperts / over[1], whole = splitParameters ? count : trainedDense + trainedExperts;
    const each = p.grad_bytes + 2 * p.master_bytes + 4 * p.moment_bytes + BF16, share = o.optimizer_offload / 100, host = g.laws.host_to_device;
    const rate = g.laws.optimizer_share * g.memory_bytes_per_s, own = memory.ownMaster(t, o), m = layout.microbatches(p);
    let found = (each * count + p.grad_bytes * count + p.grad_bytes * whole) / rate + c.HOST_STEP / g.host_speed;
    if (own && p.master_bytes === FP32) found += m * (splitParameters ? 3 : 2) * (FP32 + BF16) * count / rate;
    found += share * count * ((FP32 + BF16) / host + t.step._ADAM_BYTES / c.CPU_ADAM);
    if (own && share)
      found += m * 2 * BF16 * share * (stage.dense / over[0] + stage.experts / over[1]) / host;
    return found;
  }

  // FLOPs of a token where parts may be frozen: flops.py, trained_per_token.
  function trainedPerToken(t, p) {
    const s = p.shape, o = p.options, whole = memory.flopsPerToken(t, s, p.seq_len);
    if (!(o.lora > 0 || o.frozen.includes("decoder"))) return whole;
    const met = range(0, s.layers - 1).flatMap((i) => memory.pairs(t, s, i, o)).map(([name, wideIn, wideOut]) => (name === "experts" ? s.top_k : 1) * (wideIn + wideOut));
    return whole - memory.weightFlops(s) + t.backward * 2 * o.lora * sum(met);
  }

  // spread.py: how far the sum of the parts may be off.
  function deviation(t, parts, p, g) {
    const all = sum(Object.values(parts)), c = t.spread;
    const ofParts = hypot(...Object.entries(parts).map(([name, x]) => c._PART[name] * (name === "host" && g.host_known ? c._HOST_KNOWN : 1) * x / all));
    return hypot(ofParts, p.shape.experts ? c._COMMON_EXPERTS : c._COMMON, g.transferred);
  }

  // The laws of a kind of GPU: the reference GPU's, scaled to what its products and attention reach.
  function gpu(t, name) {
    const row = t.gpus[name], scaled = (law, by) => ({...law, share: law.share * by}), laws = t.laws;
    const attentionLaws = Object.entries(laws.attention).map(([k, [lengths, shares]]) => [k, [lengths, shares.map((x) => x * row.attention)]]);
    return {...row, name, laws: {
      ...laws, ...Object.fromEntries(["forward", "input_gradient", "weight_gradient"].map((k) => [k, scaled(laws[k], row.bf16)])), fp8: scaled(laws.fp8, row.fp8),
      grouped: Object.fromEntries(Object.entries(laws.grouped).map(([k, pair]) => [k, pair.map((law) => scaled(law, row.bf16))])),
      loss_share: laws.loss_share * row.bf16, attention: Object.fromEntries(attentionLaws),
    }};
  }

  // What a step of a plan takes on a kind of GPU: seconds, tokens per second and GPU with the 80 % interval, share of the peak, and the parts.
  function step(t, p, name) {
    const s = p.shape, g = gpu(t, name), w = work(t, p), sizes = memory.split(s.layers, p.pp, p.vpp), costs = {};
    const layers = (index) => {
      const key = JSON.stringify(kind(s, index));
      return costs[key] || (costs[key] = layer(t, g, s, index, w));
    };
    const placed = range(0, p.pp - 1).map((stage) => memory.indices(sizes, p.pp, stage).flat());
    const stages = placed.map((indices, i) => stageOf(t, g, p, w, indices, i === 0, i === p.pp - 1, layers)), slow = slowest(p, stages), m = layout.microbatches(p);
    const parts = Object.fromEntries(PARTS.map((k) => [k, m * (slow.forward[k] + slow.backward[k])]));
    Object.assign(parts, between(t, g, p, stages, slow), offloaded(t, g, p, slow, placed[0]), dataParallel(t, g, p, slow));
    parts.optimizer = optimizer(t, g, p, most(stages, (x) => x.dense / Math.max(layout.dp(p) * p.cp, 1) + x.experts / Math.max(layout.edp(p), 1)));
    if (p.gpus > 1) parts.stragglers = (p.gpus <= g.domain ? g.stragglers : t.constants.STRAGGLERS) * sum(Object.values(parts));
    const whole = sum(Object.values(parts)), off = deviation(t, parts, p, g), wide = Math.exp(t.spread.QUANTILE * off);
    const tokens = layout.globalBatch(p) * p.seq_len / p.gpus, peak = p.options.fp8 ? g.fp8_flops_per_s : g.bf16_flops_per_s;
    return {
      seconds: whole, value: tokens / whole, low: tokens / whole / wide, high: tokens / whole * wide, mfu: trainedPerToken(t, p) * tokens / whole / peak, spread: off,
      parts: Object.fromEntries(Object.entries(parts).filter(([, x]) => x > 0)),
    };
  }

  return {step};
})(PlaybookLayout, PlaybookMemory);
