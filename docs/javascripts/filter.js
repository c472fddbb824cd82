// Filters cards, claims and configuration families by text and by what they carry; those with more of the words stand first. Without this script everything is shown.
(function () {
  "use strict";
  const form = document.getElementById("pb-filters");
  if (!form) return;
  const controls = [...form.elements].filter((e) => e.name);
  const items = [...document.querySelectorAll("[data-text]")].map((e) => [e, e.closest("tr") || e]);
  const order = [...new Set(items.map(([, item]) => item.parentNode))].map((parent) => {
    const own = items.filter(([, item]) => item.parentNode === parent);
    return [parent, own, own[own.length - 1][1].nextSibling];
  });
  const none = document.getElementById("pb-none"), count = document.getElementById("pb-count");
  const value = (name) => { const found = controls.find((e) => e.name === name); return found ? found.value : ""; };

  // Where hardware and status are both asked for, one and the same verdict has to have both.
  function stands(element) {
    const pairs = (element.dataset.standings || "").split(" ").map((pair) => pair.split(":"));
    const [hardware, status] = [value("hardware"), value("status")];
    return !hardware && !status || pairs.some(([machine, word]) => (!hardware || machine === hardware) && (!status || word === status));
  }

  // The share of the words that stand in an element; 1 where there are none.
  function share(element, words) {
    return words.length ? words.filter((word) => element.dataset.text.includes(word)).length / words.length : 1;
  }

  function apply() {
    const words = value("text").toLowerCase().split(/\s+/).filter((word) => word.length > 2 || /\d/.test(word));
    const exact = controls.filter((e) => !["text", "hardware", "status"].includes(e.name) && e.value);
    const shares = new Map(items.map(([element]) => [element, share(element, words)]));
    let shown = 0, whole = 0;
    for (const [element, item] of items) {
      item.hidden = shares.get(element) < 0.5 || !stands(element) || !exact.every((e) => element.dataset[e.name] === e.value);
      shown += !item.hidden;
      whole += !item.hidden && shares.get(element) === 1;
    }
    for (const [parent, own, after] of order) {
      for (const [, item] of [...own].sort((one, other) => shares.get(other[0]) - shares.get(one[0]))) parent.insertBefore(item, after);
    }
    // A part without a match goes; one that is folded opens while something is asked for.
    const asked = controls.some((e) => e.value);
    for (const part of document.querySelectorAll(".pb-part")) {
      part.hidden = ![...part.querySelectorAll("[data-text]")].some((e) => !(e.closest("tr") || e).hidden);
      if (part.tagName === "DETAILS") part.open = asked;
    }
    none.hidden = shown > 0;
    count.textContent = `${shown} of ${items.length} shown${whole < shown ? `, ${whole} with every word` : ""}`;
  }

  // The address carries the filters: cards/index.html?text=recompile&status=confirmed
  function remember() {
    const query = new URLSearchParams(controls.filter((e) => e.value).map((e) => [e.name, e.value])).toString();
    window.history.replaceState(null, "", (query ? "?" + query : window.location.pathname) + window.location.hash);
  }

  const query = new URLSearchParams(window.location.search);
  controls.forEach((e) => { if (query.has(e.name)) e.value = query.get(e.name); });
  form.hidden = false;
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
})();
