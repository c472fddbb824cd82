// The planner's models, GPUs, published runs and plans, as the build wrote them: fetched once for the forms that ask for a model.
window.playbookModels = (function () {
  "use strict";
  const place = new URL("../search/diagnosis.json", document.currentScript.src);
  let loaded;
  const flat = (name) => name.slice(0, 200).toLowerCase().replace(/^.*\//, "").replace(/[^a-z0-9]+/g, "");

  return {
    load: () => (loaded = loaded || fetch(place).then((r) => r.json())),

    // The model of a name as publishers spell it; undefined where the planner has none of that name.
    named(models, name) {
      if (Object.hasOwn(models, name)) return name;
      const bare = flat(name), short = flat(name.replace(/-(?:instruct|base|chat|it|hf|thinking).*$/i, ""));
      return Object.keys(models).find((m) => flat(m) === bare) || Object.keys(models).find((m) => flat(m) === short);
    },

    // The model of these sizes, else the one of the same kind whose layers, columns, heads, experts and vocabulary are likest.
    sized(models, sizes) {
      const far = (m) => sizes.reduce((sum, n, i) => sum + Math.abs(Math.log((n + 1) / (models[m].sizes[i] + 1))), models[m].moe === sizes[3] > 0 ? 0 : 100);
      const model = Object.keys(models).reduce((a, b) => far(b) < far(a) ? b : a);
      return {model, exact: far(model) === 0};
    },

    // How far an entry of a table is from a question: its kind of model goes first, then work per token, the GPU's peak, and numbers.
    far({models, gpus}, entry, asked) {
      const apart = (a, b) => Math.abs(Math.log(a / b)), one = models[entry.model], other = models[asked.model];
      return (entry.model === asked.model ? 0 : 1) + (one.moe === other.moe ? 0 : 10) + apart(one.flops, other.flops) +
        apart(gpus[entry.hardware][0], gpus[asked.hardware][0]) + (entry.hardware === asked.hardware ? 0 : 0.01) +
        apart(entry.gpus, asked.gpus) / 10 + (asked.seq_len ? apart(entry.seq_len, asked.seq_len) / 2 : 0);
    },
  };
})();
